# Sourced by its neighbours: an apt that reads the machine's own mirrors and keys, and leaves its state untouched.
#
#     private_apt FOLDER ARCHITECTURE COMPONENT...   prepares FOLDER; 1 if this machine has no mirror for it
#     apt TOOL ARGUMENT...                           apt-get or apt-cache on that folder
#     unpack PACKAGE ROOT                            downloads a package and unpacks it below ROOT; no script of it runs

private_apt() {
    apt_folder=$1
    apt_architecture=$2
    shift 2
    command -v apt-get >/dev/null || {
        echo "no apt on this machine" >&2
        return 1
    }
    mkdir -p "$apt_folder/lists/partial" "$apt_folder/archives/partial"
    # apt prints a field that it does not know as its own literal name: that is no key.
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(SIGNED_BY)' 'Created-By: Packages' 'Component: main' | sort -u |
        while read -r uri release key; do
            case $key in
            '' | '$('*) options="[arch=$apt_architecture]" ;;
            *) options="[arch=$apt_architecture signed-by=$key]" ;;
            esac
            echo "deb $options $uri $release $*"
        done >"$apt_folder/private.list"
    [ -s "$apt_folder/private.list" ] || {
        echo "apt knows no repository with a component called main" >&2
        return 1
    }
    # One list of several may be unreadable while its mirror is being renewed; the others do.
    apt apt-get update >/dev/null 2>&1 || ls "$apt_folder"/lists/*Packages* >/dev/null 2>&1 || {
        echo "the machine's package mirror did not answer" >&2
        return 1
    }
}

apt() {
    tool=$1
    shift
    "$tool" -qq \
        -o Dir::Etc::sourcelist="$apt_folder/private.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$apt_folder/lists" -o Dir::State::status=/dev/null \
        -o Dir::Cache="$apt_folder" -o Dir::Cache::archives="$apt_folder/archives" \
        -o APT::Architecture="$apt_architecture" -o APT::Architectures="$apt_architecture" -o Acquire::Languages=none \
        -o APT::Sandbox::User=root -o Debug::NoLocking=1 "$@"
}

unpack() {
    (
        cd "$apt_folder/archives"
        rm -f "$1"_*.deb
        apt apt-cache show "$1" >/dev/null 2>&1 || {
            echo "the machine's mirror has no package $1" >&2
            exit 1
        }
        apt apt-get download "$1" || {
            echo "could not download $1" >&2
            exit 1
        }
        dpkg -x "$1"_*.deb "$2"
        rm -f "$1"_*.deb
    )
}
