#!/bin/sh
# An authority, and a certificate for the names of Google that are used: FOLDER/ca.pem, cert.pem, key.pem. Also the key of the
# service account that the user of the world is.
set -eu
mkdir -p "$1"
cd "$1"
names="DNS:googleapis.com,DNS:*.googleapis.com,DNS:metadata.google.internal,DNS:localhost,IP:127.0.0.1,IP:10.128.0.1"
quiet() { openssl "$@" 2> openssl.log || { cat openssl.log >&2; exit 1; }; }
quiet req -x509 -newkey rsa:2048 -nodes -days 3650 -subj "/CN=kimisession rig" -keyout ca.key -out ca.pem \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
quiet req -newkey rsa:2048 -nodes -subj "/CN=googleapis.com" -keyout key.pem -out request.pem
printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$names" > extensions
quiet x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 3650 -extfile extensions -out cert.pem
quiet genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out account.key
python3 - > account.json <<'PYTHON'
import json
account = "laptop@rig-project.iam.gserviceaccount.com"
print(json.dumps({
    "type": "service_account", "project_id": "rig-project", "private_key_id": "rig", "client_id": "1",
    "client_email": account, "private_key": open("account.key").read(),
    "auth_uri": "https://accounts.google.com/o/oauth2/auth", "token_uri": "https://oauth2.googleapis.com/token",
}))
PYTHON
rm -f request.pem extensions openssl.log account.key ca.key ca.srl
