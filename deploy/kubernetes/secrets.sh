#!/bin/sh
# Makes a folder with what the Secrets redis-server and redis-client hold: a certificate, users with random passwords,
# and a URL for each role. It needs openssl and no other file. With the word sentinel the URLs name the sentinels.
#   sh secrets.sh FOLDER [POOL] [NAMESPACE] [sentinel]
set -eu
folder=$1 pool=${2:-default} namespace=${3:-rolloutmq} way=${4:-one}
umask 077
mkdir "$folder" # an older one stays as it is: its passwords are in use

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=rolloutmq redis" \
  -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=redis" \
  -keyout "$folder/tls.key" -out "$folder/tls.csr" 2>/dev/null
printf 'subjectAltName=DNS:redis,DNS:redis.%s,DNS:redis.%s.svc,DNS:*.redis-pods,DNS:localhost' \
  "$namespace" "$namespace" >"$folder/names"
printf ',DNS:*.redis-pods.%s.svc,DNS:*.sentinels.%s.svc' "$namespace" "$namespace" >>"$folder/names"
openssl x509 -req -in "$folder/tls.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -days 825 \
  -extfile "$folder/names" -out "$folder/tls.crt" 2>/dev/null
rm "$folder/tls.csr" "$folder/names"

# The lines of docs/redis.md, which a test holds these to. What ?durable=disk and ?min_replicas= need is added below.
rights() {
  case $1 in
  producer) echo '~rmq:{POOL}:load ~rmq:{POOL}:job:* ~rmq:{POOL}:queued:* ~rmq:{POOL}:turns:* ~rmq:{POOL}:takers ~rmq:{POOL}:later:* ~rmq:{POOL}:prefers ~rmq:{POOL}:suspects ~rmq:{POOL}:deadlines ~rmq:{POOL}:clock ~rmq:{POOL}:held:* ~rmq:{POOL}:client:* ~rmq:{POOL}:reply:* ~rmq:{POOL}:news:* ~rmq:{POOL}:reader:* ~rmq:{POOL}:unread ~rmq:{POOL}:sessions ~rmq:{POOL}:session:* ~rmq:{POOL}:wake ~rmq:{POOL}:bell ~rmq:{POOL}:mark ~rmq:{POOL}:none +ping +evalsha +script|load +time +del +exists +expire +hdel +hexists +hget +hgetall +hincrby +hlen +hmget +hset +llen +lpush +rpush +sadd +sismember +smembers +srandmember +srem +sscan +unlink +xadd +xdel +xlen +xread +xrevrange +zadd +zcard +zrangebyscore +zrem +zscan +zscore' ;;
  worker) echo '~rmq:{POOL}:* +ping +evalsha +script|load +time +blpop +del +exists +expire +get +hdel +hexists +hget +hgetall +hincrby +hkeys +hmget +hrandfield +hscan +hset +hstrlen +llen +lpush +lrange +lrem +pexpire +pttl +rename +rpush +sadd +scard +set +sismember +smembers +srandmember +srem +unlink +xadd +xdel +xrange +xread +xrevrange +zadd +zcard +zcount +zpopmin +zrange +zrangebyscore +zrem +zremrangebyscore +zrevrange +zscore' ;;
  publisher) echo '~rmq:{POOL}:load ~rmq:{POOL}:weights ~rmq:{POOL}:version:* ~rmq:{POOL}:epoch:* ~rmq:{POOL}:holders ~rmq:{POOL}:transfers ~rmq:{POOL}:workers ~rmq:{POOL}:clock ~rmq:{POOL}:bell ~rmq:{POOL}:mark ~rmq:{POOL}:none +ping +evalsha +script|load +time +del +exists +expire +hget +hgetall +hincrby +hmget +hscan +hset +unlink +xadd +xread +xrevrange +zrangebyscore' ;;
  operator) echo '~rmq:{POOL}:* +ping +evalsha +script|load +time +del +exists +expire +hdel +hexists +hget +hgetall +hincrby +hkeys +hlen +hmget +hscan +hset +hvals +info +llen +lpos +lpush +lrange +pexpire +pttl +rpush +sadd +scan +scard +sismember +smembers +srandmember +srem +sscan +type +unlink +xadd +xdel +xlen +xrange +xread +xrevrange +zadd +zcard +zcount +zrange +zrangebyscore +zrank +zrem +zscan +zscore' ;;
  esac
}

# Nobody can log in as the default user. Its rights are those with which a server reads its append-only file.
echo "user default off ~* &* +@all" >"$folder/users.acl"
echo "user probe on >probe resetchannels +ping" >>"$folder/users.acl"
asks=$(openssl rand -hex 32)
for role in producer worker publisher operator; do
  password=$(openssl rand -hex 32)
  echo "user $role on >$password $(rights "$role" | sed "s/POOL/$pool/g") +wait +waitaof +eval +set +info +role" >>"$folder/users.acl"
  if [ "$way" = sentinel ]; then
    host="sentinels.$namespace.svc:26379"
    printf 'rediss+sentinel://%s:%s@sentinel-0.%s,sentinel-1.%s,sentinel-2.%s/main/0' \
      "$role" "$password" "$host" "$host" "$host" >"$folder/$role"
    printf '?sentinel_username=asks&sentinel_password=%s&min_replicas=1&' "$asks" >>"$folder/$role"
  else
    printf 'rediss://%s:%s@redis.%s.svc:6379/0?' "$role" "$password" "$namespace" >"$folder/$role"
  fi
  printf 'ssl_ca_certs=/etc/rolloutmq/ca.crt&durable=disk' >>"$folder/$role"
done
password=$(openssl rand -hex 32)
echo "user replica on >$password +psync +replconf +ping" >>"$folder/users.acl"
printf 'masteruser replica\nmasterauth %s\n' "$password" >"$folder/replica.conf"

# What sentinels log in with at the servers and at each other, and who may ask them.
password=$(openssl rand -hex 32) peers=$(openssl rand -hex 32)
echo "user sentinel on >$password resetchannels &__sentinel__:* +multi +slaveof +replicaof +ping +exec +subscribe +config|rewrite +role +publish +info +client|setname +client|kill +script|kill" >>"$folder/users.acl"
cat >"$folder/sentinel.conf" <<END
sentinel auth-user main sentinel
sentinel auth-pass main $password
sentinel sentinel-user peer
sentinel sentinel-pass $peers
user default off
user peer on >$peers allchannels +@all
user asks on >$asks resetchannels +ping +sentinel|masters
user probe on >probe resetchannels +ping +sentinel|get-master-addr-by-name +sentinel|master
END
