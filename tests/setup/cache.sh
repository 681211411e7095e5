# Sourced with $top set to the checkout. Makes .cache a link to a folder of the machine's, so that what was downloaded once
# serves each checkout. A .cache that is there stays. GPUSHARE_TEST_CACHE names another folder. One script at a time has it.
case $(id -u) in
0) shared=/var/cache/gpushare-tests ;;
*) shared=${XDG_CACHE_HOME:-$HOME/.cache}/gpushare-tests ;;
esac
shared=${GPUSHARE_TEST_CACHE:-$shared}
mkdir -p "$shared"
[ -e "$top/.cache" ] || ln -sfn "$shared" "$top/.cache"
exec 9>"$shared/lock"
flock 9
