# The lab's kernel and initramfs: fetched from Debian, built once for each kernel version, kept in the cache.
# Sourced by `run`. It writes to $CACHE only, installs nothing and needs no root (which only refreshes apt's lists).
#
# $CACHE/<kernel>-<hash>/ holds vmlinux and initrd.cpio; the hash is that of this file and guest/init. Debian ships
# no siw module (CONFIG_RDMA_SIW is off there), so it is built from linux-source against the kernel's own headers.

# What the guest loads; dependencies are found by modprobe.
MODULES=(
    crc32_generic crc32c_generic libcrc32c    # the checksums of RoCE and iWARP, asked for by name at run time
    rdma_rxe rdma_ucm                         # soft-RoCE, and RDMA_CM for programs
    veth sch_netem                            # the wire, and its faults
    virtio_pci virtio_net 9pnet_virtio 9p     # the wire between two guests, and the host's files
    overlay                                   # a /tmp that can be written
)

# The newest kernel that apt knows here: sets KERNEL_IMAGE, ABI, KERNEL_VERSION and BUILD_PACKAGES. What apt has in
# its lists is enough; the network is asked only when there is nothing in them, as on a fresh machine.
find_kernel() {
    have apt-get || die 'the lab takes its kernel from Debian packages, and there is no apt-get here'
    [ "$(dpkg --print-architecture)" = amd64 ] || die 'the lab runs on amd64 only'
    KERNEL_IMAGE=$(newest_kernel)
    if [ -z "$KERNEL_IMAGE" ] && update_lists; then KERNEL_IMAGE=$(newest_kernel); fi
    [ -n "$KERNEL_IMAGE" ] ||
        die "apt knows no linux-image-amd64: on Debian, run 'apt-get update' as root; elsewhere, there is no lab"
    ABI=${KERNEL_IMAGE#linux-image-}
    KERNEL_VERSION=$(apt-cache show --no-all-versions "$KERNEL_IMAGE" | sed -n 's/^Version: //p' | head -n1)
    mapfile -t BUILD_PACKAGES < <(apt-cache depends "linux-headers-$ABI" 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-[^ ]*\)$/\1/p' | grep -v '^linux-image')
    [ ${#BUILD_PACKAGES[@]} -gt 0 ] || die "apt knows no linux-headers-$ABI"
}

newest_kernel() {
    apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n1
}

update_lists() { [ "$(id -u)" = 0 ] && apt-get update -qq >&2; }

# The compiler that the kernel was built with, as its headers name it: gcc-12 on Debian 12.
kernel_compiler() { printf '%s\n' "${BUILD_PACKAGES[@]}" | sed -n 's/^linux-compiler-\(gcc-[0-9]*\)-.*/\1/p' | head -n1; }

# Where this kernel's image is, or will be.
image_dir() {
    local hash
    hash=$(cat "$LAB/image.sh" "$LAB/guest/init" | sha256sum | cut -c1-8)
    printf '%s/%s-%s-%s\n' "$CACHE" "$ABI" "$KERNEL_VERSION" "$hash"
}

# Sets IMAGE. Two runs that start together build once.
prepare() {
    local lock missing
    find_kernel
    IMAGE=$(image_dir)
    if [ -s "$IMAGE/initrd.cpio" ]; then
        touch "$IMAGE" # still used: see below
        return
    fi
    # It will be fetched, so let it be one that the archive still has.
    if update_lists; then find_kernel; IMAGE=$(image_dir); fi
    missing=$(missing_packages build | xargs)
    [ -z "$missing" ] || die_missing "$missing"
    mkdir -p "$CACHE"
    exec {lock}>"$CACHE/lock"
    flock "$lock"
    if [ -s "$IMAGE/initrd.cpio" ]; then
        say 'another run has built the image meanwhile'
    else
        say "building the image of kernel $KERNEL_VERSION in $CACHE"
        # Not in a condition: there, the shell ignores -e in all of it.
        (build_image)
        # Images of other kernels or of another state of the lab, unless another checkout still uses them.
        find "$CACHE" -mindepth 1 -maxdepth 1 -type d ! -path "$IMAGE" -mtime +7 -exec rm -rf {} +
    fi
    exec {lock}>&-
}

build_image() {
    local work=$CACHE/build version=${ABI%%-*} series source
    series=$(cut -d. -f1,2 <<<"$version")
    source=linux-source-$series
    rm -rf "$work"
    mkdir -p "$work"/{debs,kernel,headers,siw,root,out}
    cd "$work"
    fetch_packages "$source"
    dpkg-deb -x debs/linux-image-*.deb kernel
    unpack_kernel "kernel/boot/vmlinuz-$ABI"
    build_siw "$source"
    build_initramfs
    cd "$CACHE"
    rm -rf "$IMAGE"
    mv "$work/out" "$IMAGE"
    rm -rf "$work"
}

fetch_packages() {
    local packages=("$KERNEL_IMAGE=$KERNEL_VERSION" "linux-headers-$ABI" "${BUILD_PACKAGES[@]}" "$1=$KERNEL_VERSION")
    # As root, apt wants to drop its rights, and may not write here then.
    (cd debs && apt-get -qq -o APT::Sandbox::User=root download "${packages[@]}") 2>fetch.log && return
    cat fetch.log >&2
    die "the kernel could not be fetched. Are apt's lists old ('apt-get update', as root), or is there no network?"
}

# An uncompressed kernel starts by PVH at once; under emulation, its own decompressor takes longer than the rest of the
# boot. A kernel packed in another way than by xz boots as it is.
unpack_kernel() {
    local at
    at=$(LC_ALL=C grep -obUaP -m1 '\xfd7zXZ\x00' "$1" | head -n1 | cut -d: -f1) || at=
    # xz stops reading at the end of its stream; tail then fails, and that is no error.
    if [ -n "$at" ] && xz -dc --single-stream < <(tail -c "+$((at + 1))" "$1" 2>/dev/null) >out/vmlinux; then return; fi
    cp "$1" out/vmlinux
}

build_siw() {
    local tree
    dpkg-deb --fsys-tarfile debs/"$1"_*.deb | tar -xO "./usr/src/$1.tar.xz" |
        tar -xJ -C siw --strip-components=5 "$1/drivers/infiniband/sw/siw"
    for tree in debs/linux-headers-* debs/linux-kbuild-* debs/linux-compiler-*; do
        [ ! -e "$tree" ] || dpkg-deb -x "$tree" headers
    done
    # The headers name each other by the path that they would be installed at.
    tree=$PWD/headers/usr/src/linux-headers-$ABI
    sed -i "s#/usr/src/#$PWD/headers/usr/src/#" "$tree/Makefile"
    make -s -j"$(nproc)" -C "$tree" M="$PWD/siw" CONFIG_RDMA_SIW=m modules >siw.log 2>&1 ||
        { cat siw.log >&2; die 'siw.ko does not build (above)'; }
    strip -g siw/siw.ko
}

# busybox, the modules in the order to load them in, and guest/init.
build_initramfs() {
    local module file PATH=$PATH:/usr/sbin:/sbin
    mkdir -p root/{bin,modules,proc,sys,dev,host,lower,upper}
    cp "$(command -v busybox)" root/bin/busybox
    ln -s busybox root/bin/sh
    depmod -b kernel "$ABI"
    for module in "${MODULES[@]}"; do
        modprobe -d kernel -S "$ABI" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
    done | awk '!seen[$0]++' | while read -r file; do
        cp "$file" root/modules/
        basename "$file"
    done >root/modules/order
    cp siw/siw.ko root/modules/
    echo siw.ko >>root/modules/order
    cp "$LAB/guest/init" root/init
    chmod +x root/init
    (cd root && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0 --quiet) >out/initrd.cpio
}
