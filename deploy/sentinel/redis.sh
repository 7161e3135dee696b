#!/bin/sh
# Starts a server as what two of the three sentinels say that it is: the primary, or a replica of the primary. Nothing
# else says so: a primary that starts again after a failover, or in the midst of one, must not be one.
set -eu
trap 'exit 143' TERM # as process 1 it would not end before
me="$HOSTNAME.redis-pods.$NAMESPACE.svc 6379"
sentinels="
  sentinel-0.sentinels.$NAMESPACE.svc 26379
  sentinel-1.sentinels.$NAMESPACE.svc 26379
  sentinel-2.sentinels.$NAMESPACE.svc 26379"

# The answers of the sentinels to a command, a line each.
asked() {
  echo "$sentinels" | while read -r host port; do
    [ -z "$host" ] || timeout 3 valkey-cli --tls --cacert /etc/redis/secret/ca.crt --user probe --pass probe \
      -h "$host" -p "$port" sentinel "$@" main </dev/null 2>/dev/null | tr '\n' ' ' | sed 's/ $/\n/'
  done
}

# Where two of them have the primary.
told() {
  asked get-master-addr-by-name | grep -E '^[^ ]+ [0-9]+$' | sort | uniq -d
}

# Whether another one may be promoted now: this server was away for long enough to be missed. Without a failover for ten
# looks there is none to promote.
replaced() {
  case $(asked master) in
  *failover_in_progress*) looks=0 ;;
  *s_down*) looks=$((looks + 1)) ;;
  *) return 1 ;;
  esac
  [ "$looks" -lt 10 ]
}

looks=0
while primary=$(told) && { [ -z "$primary" ] || { [ "$primary" = "$me" ] && replaced; }; }; do
  echo "$me waits: the sentinels name ${primary:-no primary}${primary:+, and may replace it}" >&2
  sleep 1
done
echo "$me: the primary is $primary" >&2
set -- /etc/redis/redis.conf --replica-announce-ip "${me% *}" --replica-announce-port "${me#* }"
[ "$primary" = "$me" ] || set -- "$@" --replicaof "${primary% *}" "${primary#* }"
exec valkey-server "$@"
