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

# Whether this server may be the primary, as which it is known: not in the midst of a failover. One that is missed looks
# twice, as a failover may be about to begin. No longer: a replica that has just started, with less, may be promoted.
may_lead() {
  answers=$(asked master)
  [ "$(echo "$answers" | grep -c .)" -ge 2 ] || return 1
  case $answers in
  *failover_in_progress*) looks=0 && return 1 ;;
  *s_down*) looks=$((looks + 1)) && [ "$looks" -ge 2 ] ;;
  esac
}

looks=0
until primary=$(told) && [ -n "$primary" ] && { [ "$primary" != "$me" ] || may_lead; }; do
  echo "$me waits: the sentinels name ${primary:-no primary}${primary:+, and may replace it}" >&2
  sleep 1
done
echo "$me: the primary is $primary" >&2
set -- /etc/redis/redis.conf --replica-announce-ip "${me% *}" --replica-announce-port "${me#* }"
[ "$primary" = "$me" ] || set -- "$@" --replicaof "${primary% *}" "${primary#* }"
exec valkey-server "$@"
