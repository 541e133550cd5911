# Run by `sh -eu` in namespaces of its own: gives the root in $1 a /proc and the harmless devices,
# enters it and becomes the rest of the arguments. The mounts end with the namespace.
root=$1
shift
mount -t proc -o nosuid,nodev,noexec none "$root/proc"
mount -t tmpfs -o mode=755,size=1m,nosuid none "$root/dev"
for device in null zero full random urandom; do
  : > "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir -m 1777 "$root/dev/shm"
exec chroot "$root" /usr/bin/env -i \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
