#!/bin/sh
# Makes a folder with what the Secrets redis-server and redis-client hold: a certificate, users with random passwords,
# and a URL for each role. The rights are the lines of docs/redis.md, and what ?durable=disk and ?min_replicas= need.
#   sh secrets.sh FOLDER [POOL] [NAMESPACE]
set -eu
folder=$1 pool=${2:-default} namespace=${3:-rolloutmq}
docs=$(dirname "$0")/../../docs/redis.md
umask 077
mkdir "$folder" # an older one stays as it is: its passwords are in use

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=rolloutmq redis" \
  -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=redis" \
  -keyout "$folder/tls.key" -out "$folder/tls.csr" 2>/dev/null
printf 'subjectAltName=DNS:redis,DNS:redis.%s,DNS:redis.%s.svc,DNS:*.redis-pods,DNS:localhost' \
  "$namespace" "$namespace" >"$folder/names"
openssl x509 -req -in "$folder/tls.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -days 825 \
  -extfile "$folder/names" -out "$folder/tls.crt" 2>/dev/null
rm "$folder/tls.csr" "$folder/names"

# Nobody can log in as the default user. Its rights are those with which a server reads its append-only file.
echo "user default off ~* &* +@all" >"$folder/users.acl"
echo "user probe on >probe resetchannels +ping" >>"$folder/users.acl"
for role in producer worker publisher operator; do
  password=$(openssl rand -hex 32)
  rights=$(sed -n "s/^ACL SETUSER rolloutmq-$role reset on >PASSWORD //p" "$docs" | sed "s/POOL/$pool/g")
  test -n "$rights"
  echo "user $role on >$password $rights +wait +waitaof +eval +set +info" >>"$folder/users.acl"
  printf 'rediss://%s:%s@redis.%s.svc:6379/0?ssl_ca_certs=/etc/rolloutmq/ca.crt&durable=disk' \
    "$role" "$password" "$namespace" >"$folder/$role"
done
password=$(openssl rand -hex 32)
echo "user replica on >$password +psync +replconf +ping" >>"$folder/users.acl"
printf 'masteruser replica\nmasterauth %s\n' "$password" >"$folder/replica.conf"
