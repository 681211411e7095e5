#!/bin/sh
# Packs what install.sh installs: package.sh deb|rpm|tar|image VERSION FOLDER. Prints the file that it made in FOLDER,
# beside which lies its sha256. The same checkout with the same target/ gives the same bytes.
#
# Here is all that a package says of itself. Which files it has, install.sh says: nothing is listed twice. The agent
# for Kubernetes is in the image alone, from which a cluster installs all of gpushare; on nodes with a package it is
# copied by hand.
set -eu
umask 022
export LC_ALL=C TZ=UTC

name=gpushare
summary='share GPUs between containers, with limits that hold'
description='gpushare is an OCI runtime in front of runc or crun. A container asks for a
share of a GPU, in memory and compute; the node grants it, or says why not.
Inside, nvidia-smi, NVML and CUDA show a GPU of exactly that size. The share
comes back however the container ends. Containers that ask for nothing reach
runc as they came.'
licence=Apache-2.0
# For amd64, of what `make build` made; with PACKAGE_ARCH=arm64 of what `make arm64` did. BUILT names another
# folder that is laid out as these are.
arch=${PACKAGE_ARCH:-amd64}
# Whoever publishes packages says who answers for them.
maintainer=${MAINTAINER:-gpushare maintainers <maintainers@gpushare.invalid>}
# How hard xz and gzip try, 0 to 9. Tests do not wait for the last tenth.
level=${XZ_LEVEL:-9}
# How many bytes a deb may have as it ships.
most=6000000

fail() {
    echo "package.sh: $*" >&2
    exit 1
}
[ $# = 3 ] || fail "say deb, rpm, tar or image, a version and a folder, as: package.sh deb 0.1.0 dist"
kind=$1
version=$2
here=$(cd "$(dirname "$0")" && pwd)
top=$(dirname "$here")
case $version in
*[!A-Za-z0-9.+~]*) fail "a version has letters, digits and .+~ alone, as 0.1.0: $version" ;;
[0-9]*) ;;
*) fail "a version begins with a digit, as 0.1.0 does: $version" ;;
esac
case $arch in
amd64) machine=x86_64 built=$top/target ;;
arm64)
    machine=aarch64 built=$top/target/arm64
    description="$description
This build is untested on this architecture."
    [ "$kind" != image ] || fail "an image is made for amd64 alone: it has programs of the machine that makes it"
    ;;
*) fail "no such architecture: $arch; PACKAGE_ARCH is amd64 or arm64" ;;
esac
export PACKAGE_ARCH="$arch" BUILT="${BUILT:-$built}"
case $kind in
deb) tool=dpkg-deb hint=dpkg ;;
rpm) tool=rpmbuild hint="rpm (Debian, Ubuntu) or rpm-build (Fedora)" ;;
tar) tool=tar hint=tar ;;
image) tool=ldd hint=libc-bin ;;
*) fail "no kind of package: $kind; say deb, rpm, tar or image" ;;
esac
for needed in $tool python3 readelf; do
    [ "$needed" = "$tool" ] || hint=$needed
    command -v "$needed" >/dev/null || fail "$needed is missing: install the package $hint"
done
mkdir -p "$3"
out=$(cd "$3" && pwd)

# One date for everything: the one that is given, else the last commit's, else the one of the sources.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$top" log -1 --format=%ct 2>/dev/null || stat -c %Y "$top/Cargo.toml")}
export SOURCE_DATE_EPOCH
# The newest version of leases that these programs read; see lifecycle.sh.
ledger=$(sed -n 's/^const VERSION: u32 = \([0-9]*\);.*/\1/p' "$top/quota/src/ledger/text.rs")
[ -n "$ledger" ] || fail "quota/src/ledger/text.rs does not tell VERSION any more: mend package.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
tree=$work/tree

# stage PREFIX [PROGRAM...]: what `make install` lays out, what it and PROGRAM were made of, and under which licences.
stage() {
    "$here/install.sh" "$tree" "$1"
    prefix=$1
    shift
    "$here/sbom.py" "$tree$prefix/share/doc/gpushare" "$@"
}

# Distributions keep manual pages so.
compress_manuals() {
    [ ! -d "$tree/usr/share/man" ] || find "$tree/usr/share/man" -type f ! -name '*.gz' -exec gzip -9n {} +
}

dated() {
    find "$1" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
}

finished() {
    (cd "$out" && sha256sum "$1" >"$1.sha256")
    echo "$out/$1"
}

# changes deb|rpm: CHANGELOG.md in the format's own form. What is not released yet is of the version that is packed.
changes() {
    awk -v form="$1" -v name="$name" -v version="$version" -v maintainer="$maintainer" -v now="@$SOURCE_DATE_EPOCH" '
        function date(format,   call, line) {
            call = "date -d " day " " format
            call | getline line
            close(call)
            return line
        }
        function item(   words, count, i, line) {
            count = split(text, words, " ")
            line = lead words[1]
            for (i = 2; i <= count; i++) {
                if (length(line " " words[i]) > 78) { lines[++n] = line; line = indent words[i] }
                else line = line " " words[i]
            }
            if (count) lines[++n] = line
            text = ""
        }
        function release(   i) {
            item()
            if (n && form == "deb") print name " (" of ") unstable; urgency=medium\n"
            if (n && form == "rpm") print "* " date("+\"%a %b %d %Y\"") " " maintainer " - " of "-1"
            for (i = 1; i <= n; i++) print lines[i]
            if (n && form == "deb") print "\n -- " maintainer "  " date("-R")
            if (n) print ""
            n = 0
        }
        BEGIN { lead = form == "deb" ? "  * " : "- "; indent = form == "deb" ? "    " : "  " }
        /^## / {
            release()
            gsub(/[][]/, "")
            unreleased = tolower($2) == "unreleased"
            of = unreleased ? version : $2
            day = unreleased ? now : $NF
            started = 1
            next
        }
        !started { next }
        /^### / { item(); kind = $2; next }
        /^- / { item(); text = kind ": " substr($0, 3); next }
        /^  / && text != "" { text = text " " $0; next }
        /^$/ { item() }
        END { release() }
    ' "$top/CHANGELOG.md"
}

# script ACTION...: a script of the package, with all of lifecycle.sh before what it does.
script() {
    printf '#!/bin/sh\nset -e\nwho=gpushare\n'
    grep -v '^#' "$here/lifecycle.sh"
    printf '%s\n' "$@"
}

# The lowest glibc that has all that the programs call.
glibc() {
    find "$tree" -type f \( -perm -u+x -o -name '*.so*' \) -exec readelf --wide --version-info {} + 2>/dev/null |
        sed -n 's/.*Name: GLIBC_\([0-9.]*\) .*/\1/p' | sort -Vu | tail -n 1
}

deb() {
    stage /usr
    compress_manuals
    doc=$tree/usr/share/doc/gpushare
    changes deb | gzip -9n >"$doc/changelog.gz"
    # The package's own form of CHANGELOG.md and LICENSE: Debian has the licence's text on every machine.
    cat >"$doc/copyright" <<EOF
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: $name
Comment: Libraries that are linked into the programs are listed with their licences in third-party-licences.txt
 beside this file, and in sbom.cdx.json.

Files: *
Copyright: the authors of gpushare
License: Apache-2.0
 On Debian systems the full text of this licence is in /usr/share/common-licenses/Apache-2.0.
EOF
    rm "$doc/LICENSE"
    install -d "$tree/usr/share/lintian/overrides" "$tree/DEBIAN"
    install -m 644 "$here/lintian-overrides" "$tree/usr/share/lintian/overrides/$name"
    (cd "$tree" && find etc -type f | sed 's|^|/|' | sort) >"$tree/DEBIAN/conffiles"
    {
        printf '%s\n' "Package: $name" "Version: $version" "Architecture: $arch" "Maintainer: $maintainer" \
            "Section: admin" "Priority: optional" "Installed-Size: $(du -sk --apparent-size "$tree" | cut -f1)" \
            "Depends: libc6 (>= $(glibc)), libgcc-s1" "Recommends: runc | crun" "Description: $summary"
        printf '%s\n' "$description" | sed 's/^/ /'
    } >"$tree/DEBIAN/control"
    # An upgrade asks nothing of containers that run: dpkg replaces files by rename.
    script "case \$1 in install | upgrade) may_come $ledger ;; esac" >"$tree/DEBIAN/preinst"
    script 'if [ "$1" = configure ]; then after_install /usr "${2:+upgrade}"; fi' >"$tree/DEBIAN/postinst"
    script 'if [ "$1" = remove ]; then may_go /usr; stop_units /usr; fi' >"$tree/DEBIAN/prerm"
    script 'case $1 in' 'remove) reload_units; forget_shares /usr ;;' 'purge) forget_all /usr ;;' 'esac' >"$tree/DEBIAN/postrm"
    chmod 755 "$tree"/DEBIAN/p*
    (cd "$tree" && find usr -type f -exec md5sum {} + | sort -k 2) >"$tree/DEBIAN/md5sums"
    dated "$tree"
    file=${name}_${version}_$arch.deb
    # One thread: how many there are shows in the bytes.
    DPKG_DEB_THREADS_MAX=1 dpkg-deb --root-owner-group -Zxz "-z$level" --build "$tree" "$out/$file" >/dev/null
    size=$(stat -c %s "$out/$file")
    [ "$level" != 9 ] || [ "$size" -le "$most" ] || {
        rm "$out/$file"
        fail "$file would have $size bytes, and may have $most"
    }
    finished "$file"
}

rpm() {
    stage /usr
    compress_manuals
    dated "$tree"
    # scriptlet SECTION ACTION...: $1 is the number of this package's versions that will be installed.
    scriptlet() {
        echo "%$1"
        shift
        script "$@" | sed '1d; s/%/%%/g'
        echo
    }
    {
        cat <<EOF
Name: $name
Version: $version
Release: 1
Summary: $(printf %.1s "$summary" | tr a-z A-Z)${summary#?}
License: $licence
Packager: $maintainer
Vendor: gpushare
Group: System/Management
Recommends: (runc or crun)
# The libraries stand in for the driver's inside containers; no program of the host may be given them.
%global __provides_exclude_from ^/usr/lib/gpushare
%description
$description
%install
cp -a $tree/. %{buildroot}
EOF
        scriptlet pre "may_come $ledger"
        scriptlet post 'if [ "$1" -gt 1 ]; then after_install /usr upgrade; else after_install /usr new; fi'
        scriptlet preun 'if [ "$1" = 0 ]; then may_go /usr; stop_units /usr; fi'
        # There is no purge. The history is data, and stays as changed settings do.
        scriptlet postun 'reload_units' 'if [ "$1" = 0 ]; then' 'forget_shares /usr' 'if [ -e /var/lib/gpushare ]; then' \
            'echo "gpushare: kept /var/lib/gpushare: what \`gpushare history\` tells"' 'fi' 'fi'
        echo '%files'
        # Folders of others stay theirs.
        (cd "$tree" && find . -type d -path '*gpushare*' | sed 's|^\.\(.*\)|%dir "\1"|' | sort)
        (cd "$tree" && find . ! -type d | sed -e 's|^\./etc/.*|%config(noreplace) &|' -e 's| *\./\(.*\)| "/\1"|' | sort)
        echo '%changelog'
        changes rpm | sed 's/%/%%/g'
    } >"$work/$name.spec"
    rpmbuild -bb --quiet --target "$machine-linux" \
        --define "_topdir $work/rpm" --define "_rpmdir $work" --define "_build_name_fmt $name-%{VERSION}-1.$machine.rpm" \
        --define '_buildhost gpushare' --define 'use_source_date_epoch_as_buildtime 1' \
        --define "_binary_payload w$level.xzdio" --define 'debug_package %{nil}' \
        --define '_build_id_links none' --define '__os_install_post %{nil}' "$work/$name.spec" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        fail "rpmbuild did not work: see above"
    }
    mv -f "$work/$name-$version-1.$machine.rpm" "$out"
    finished "$name-$version-1.$machine.rpm"
}

# For machines without Rust, whatever their package manager. The tree is laid out for no prefix yet: the tarball's
# install.sh writes the one that it is given into the files that name the programs.
tar() {
    stage /@PREFIX@
    folder=$work/$name-$version
    mkdir "$folder"
    mv "$tree" "$folder/tree"
    sed "s/@LEDGER@/$ledger/" "$here/tarball-install.sh" >"$folder/install.sh"
    chmod 755 "$folder/install.sh"
    install -m 755 "$here/uninstall.sh" "$folder"
    install -m 644 "$here/lifecycle.sh" "$top/LICENSE" "$top/README.md" "$folder"
    command tar -C "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=gnu \
        -cf "$work/tar" "$name-$version"
    gzip -9n <"$work/tar" >"$out/$name-$version-$machine.tar.gz"
    finished "$name-$version-$machine.tar.gz"
}

# For clusters: an archive of an OCI image. `localhost/gpushare` is a name that no engine looks for elsewhere; whoever
# has a registry names it by IMAGE. AGENT names another gpushare-kube than that of `make kube`.
#
# Besides what nodes get, in /opt/gpushare, it has what runs in its containers: node.sh, a busybox for that, and the
# glibc of this machine for gpushare and gpushare-kube. A static glibc is no way out: gpushare opens NVML, and resolving
# names loads libraries. On a node both run with the node's own glibc.
image() {
    agent=${AGENT:-$top/target/release/gpushare-kube}
    for needed in "$agent" /bin/busybox; do
        [ -x "$needed" ] || fail "$needed is missing: run \`make kube\`, and install the package busybox-static"
    done
    ! readelf --program-headers /bin/busybox | grep -q INTERP ||
        fail "/bin/busybox needs libraries: install the package busybox-static"
    stage /opt/gpushare gpushare-kube
    staged=$tree
    tree=$work/image
    programs=$tree/opt/gpushare
    mkdir -p "$programs/lib/systemd/system" "$tree/bin" "$tree/usr/lib/gpushare" "$tree/usr/share/doc" "$tree/host" \
        "$tree/etc" "$tree/proc" "$tree/sys" "$tree/dev" "$tree/tmp"
    chmod 1777 "$tree/tmp"
    # What a node needs. The simulator, units and pages stay behind; licences are for who has the image.
    cp -a "$staged/opt/gpushare/bin" "$programs"
    rm "$programs/bin/gpushare-simulator"
    cp -a "$staged/opt/gpushare/lib/gpushare" "$programs/lib"
    cp -a "$staged/opt/gpushare/lib/systemd/system/gpushare-system.service" "$programs/lib/systemd/system"
    install -m 755 "$agent" "$programs/bin/gpushare-kube"
    mkdir "$tree/usr/share/doc/gpushare"
    for file in LICENSE sbom.cdx.json third-party-licences.txt; do
        cp "$staged/opt/gpushare/share/doc/gpushare/$file" "$tree/usr/share/doc/gpushare"
    done
    # A build is named by its version and its bytes: another build is another folder, which nobody uses yet.
    (cd "$programs" && find . -type f | sed 's|^\./||' | sort | xargs sha256sum) >"$work/SHA256SUMS"
    mv "$work/SHA256SUMS" "$programs"
    echo "$version-$(sha256sum "$programs/SHA256SUMS" | cut -c 1-12)" >"$programs/BUILD"

    sed "s/@LEDGER@/$ledger/; s/@GLIBC@/$(glibc)/" "$here/node.sh" >"$tree/usr/lib/gpushare/node.sh"
    chmod 755 "$tree/usr/lib/gpushare/node.sh"
    install -m 644 "$here/lifecycle.sh" "$tree/usr/lib/gpushare"
    install -m 755 /bin/busybox "$tree/bin"
    for applet in cat chroot cp cut dirname grep head ln ls mkdir mv nsenter readlink rm rmdir sed sh sha256sum sleep \
        sort stat sync tr umount xargs; do
        ln -s busybox "$tree/bin/$applet"
    done
    ldd "$programs/bin/gpushare" "$programs/bin/gpushare-kube" | sed -n 's|.*[ \t]\(/[^ ]*\) (.*|\1|p' | sort -u |
        while read -r library; do
            install -D -m 755 "$library" "$tree$library"
        done
    for package in busybox-static libc6 libgcc-s1; do
        [ ! -e "/usr/share/doc/$package/copyright" ] ||
            install -D -m 644 "/usr/share/doc/$package/copyright" "$tree/usr/share/doc/$package/copyright"
    done
    file=$name-$version-amd64.oci.tar
    "$here/oci.py" "$tree" "$out/$file" "${IMAGE:-localhost/gpushare}" "$version" "$level"
    finished "$file"
}

"$kind"
