#!/bin/bash
# A world of its own for the GCE rig: user, net, mount, pid, uts and ipc namespaces that vanish with the process that made them.
# Inside it Google's names are the emulator's, there is nothing outside, and pretended machines can be made. As any user.
#
#     world.sh FOLDER         says "rig: ready" on standard output, and stays until it is killed
#
# FOLDER/home is the home there (/root, whoever calls); FOLDER/state.json and FOLDER/emulator.log are the emulator's.
set -eu
if [ "$1" != --inside ]; then
    exec unshare --user --map-root-user --net --mount --pid --uts --ipc --fork --kill-child --mount-proc "$0" --inside "$@"
fi
folder=$2
here=$(cd "$(dirname "$0")" && pwd -P)
checkout=$(cd "$here/../../../.." && pwd -P)
image=$checkout/.cache/rigs/gce
python=$(sed -n 's/^home = //p' "$checkout/.cache/rigs/venv/pyvenv.cfg")
python=$(cd "$python/.." && pwd -P)

mount --make-rprivate /
mkdir -p "$folder/home"
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/keep/checkout /run/keep/python /run/keep/folder /run/lock /run/vms /run/netns
mount --rbind "$checkout" /run/keep/checkout
mount --rbind "$folder" /run/keep/folder
mount --rbind "$python" /run/keep/python
# The home of whoever is root here, and a /tmp of its own; what is needed of the old ones is put back.
mount --bind "$folder/home" /root
mount -t tmpfs -o mode=1777 tmp /tmp
for pair in "checkout $checkout" "python $python" "folder $folder"; do
    read -r name place <<< "$pair"
    case $place in /root/* | /tmp/*) mkdir -p "$place" && mount --rbind "/run/keep/$name" "$place" ;; esac
done
mount -t overlay -o "userxattr,ro,lowerdir=$image/usr:/usr" usr /usr
mkdir -p /run/bin
cp "$here/gcloud" "$here/on" /run/bin/
printf '%s\n' "127.0.0.1 localhost rig" "169.254.169.254 metadata.google.internal metadata" > /run/hosts
for name in oauth2 compute iam cloudresourcemanager serviceusage www cloudbilling; do
    echo "10.128.0.1 $name.googleapis.com" >> /run/names
done
echo "10.128.0.2 storage.googleapis.com" >> /run/names
cat /run/names >> /run/hosts
mount --bind /run/hosts /etc/hosts
hostname rig

ip link set lo up
ip link add rig0 type bridge
ip address add 10.128.0.1/20 dev rig0
ip address add 10.128.0.2/20 dev rig0
ip address add 169.254.169.254/32 dev rig0
ip link set rig0 up
ip route add 34.1.1.0/24 dev rig0

mkdir -p /root/.ssh /root/.config/gcloud /root/.sky
cp "$image/tls/account.json" /root/
[ -e /root/.sky/wheels ] || cp -a "$image/sky/wheels" /root/.sky/
cp "$here/config.yaml" /root/.sky/config.yaml

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONPATH=$checkout PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 RIG_IMAGE=$image
python=$checkout/.cache/rigs/venv/bin/python tls="$image/tls/cert.pem $image/tls/key.pem"
"$python" -m tests.rigs.gce.world.catalog /root/.sky/catalogs/v8
# shellcheck disable=SC2086  # two words
"$python" -m tests.rigs.gce.world.storage /run/bucket $tls >> "$folder/storage.log" 2>&1 &
{
    # It keeps its state over restarts: a test may kill it.
    while :; do
        "$python" -m tests.rigs.gce.emulator --state "$folder/state.json" --project rig-project \
            --listen 127.0.0.1:443 --listen 10.128.0.1:443 --cert "$image/tls/cert.pem" --key "$image/tls/key.pem" \
            --admin 127.0.0.1:8080 --metadata 169.254.169.254:80 \
            --machines tests.rigs.gce.world.machines:namespaces >> "$folder/emulator.log" 2>&1 || true
        sleep 0.2
    done
} &
until curl -s -o /dev/null http://127.0.0.1:8080/; do sleep 0.1; done
admin() { curl -sS --fail-with-body -d "$2" "http://127.0.0.1:8080/admin/$1" > /dev/null; }
account=laptop@rig-project.iam.gserviceaccount.com
admin account "{\"email\": \"$account\"}"
admin bind "{\"member\": \"serviceAccount:$account\", \"role\": \"roles/owner\"}"
echo "rig: ready"
while :; do sleep 3600 & wait $!; done
