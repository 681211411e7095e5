#!/bin/sh
# Installs gpushare from this tarball: install.sh [DESTDIR [PREFIX]], below /usr/local when nothing is said.
# uninstall.sh beside it, called the same, takes it away again. A later version installs over an earlier one; containers
# that run keep what they have mounted.
set -eu
umask 022

here=$(CDPATH= cd -- "$(dirname "$0")" && pwd)
who=install.sh
# shellcheck source=packaging/lifecycle.sh
. "$here/lifecycle.sh"
at "${1-}" "${2-/usr/local}"
[ -n "$destdir" ] || may_come @LEDGER@
alone "$destdir" "$prefix"
# What is being written when this ends, or a subshell of it, which sets the trap anew.
new=
clear_new() { [ -z "$new" ] || rm -f "$new"; }
trap clear_new EXIT
trap 'exit 143' HUP INT TERM

# put FILE: first under another name and then renamed, so that nobody ever meets half a file, none, or one without the
# prefix.
put() {
    case $1 in
    etc/*) to=$destdir/$1 ;;
    *) to=$destdir$prefix/${1#@PREFIX@/} ;;
    esac
    # The administrator's settings are never replaced; the shipped ones lie in share/gpushare to compare.
    case $1 in etc/*) [ ! -e "$to" ] && [ ! -L "$to" ] || return 0 ;; esac
    new=${to%/*}/.${to##*/}.new
    mkdir -p "${to%/*}"
    # A link in its place would be followed.
    rm -f "$new"
    cp -p "$here/tree/$1" "$new"
    if grep -qI '/@PREFIX@' "$new"; then
        sed "s|/@PREFIX@|$prefix|g" "$here/tree/$1" >"$new"
    fi
    [ "$(id -u)" != 0 ] || chown 0:0 "$new"
    # Who has unpacked the tarball has given it other modes.
    case $1 in
    */bin/*) chmod 755 "$new" ;;
    *) chmod 644 "$new" ;;
    esac
    mv -fT "$new" "$to"
}

# By this list uninstall.sh knows manual pages and completions, also of an installation that was cut short.
put "@PREFIX@/share/gpushare/pages"
[ -n "$destdir" ] || note_installed "$prefix"
# What is called comes before who calls it (bin last), and the wrapper, which engines call, comes last of all.
cd "$here/tree"
find . ! -type d | sed 's|^\./||' | sort | {
    trap clear_new EXIT
    while read -r file; do
        case $file in
        */bin/*) ;;
        *) put "$file" ;;
        esac
    done
}
for program in "@PREFIX@"/bin/*; do
    [ "${program##*/}" = gpushare-runtime ] || put "$program"
done
put "@PREFIX@/bin/gpushare-runtime"
mkdir -p "$destdir/etc/gpushare/gpushare.toml.d"
[ -n "$destdir" ] || after_install "$prefix" new
