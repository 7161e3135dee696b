#!/bin/sh
# Starts a server as what two of the three sentinels say that it is: the primary, or a replica of the primary. Nothing
# else says so: a primary that starts again after a failover must not be one.
set -eu
me="$HOSTNAME.redis-pods.$NAMESPACE.svc 6379"
sentinels="
  sentinel-0.sentinels.$NAMESPACE.svc 26379
  sentinel-1.sentinels.$NAMESPACE.svc 26379
  sentinel-2.sentinels.$NAMESPACE.svc 26379"

# One line for each sentinel that answers; of those, one that came twice.
told() {
  echo "$sentinels" | while read -r host port; do
    [ -z "$host" ] || timeout 3 valkey-cli --tls --cacert /etc/redis/secret/ca.crt --user probe --pass probe \
      -h "$host" -p "$port" sentinel get-master-addr-by-name main </dev/null 2>/dev/null | tr '\n' ' ' | sed 's/ $/\n/'
  done | grep -E '^[^ ]+ [0-9]+$' | sort | uniq -d
}

until primary=$(told) && [ -n "$primary" ]; do
  echo "$me: no two sentinels name a primary yet" >&2
  sleep 1
done
echo "$me: the primary is $primary" >&2
set -- /etc/redis/redis.conf --replica-announce-ip "${me% *}" --replica-announce-port "${me#* }"
[ "$primary" = "$me" ] || set -- "$@" --replicaof "${primary% *}" "${primary#* }"
exec valkey-server "$@"
