#!/bin/sh
# Starts a sentinel. Its configuration is its memory (who is the primary, in which epoch), so it is made once and kept.
set -eu
me="$HOSTNAME.sentinels.$NAMESPACE.svc"
memory=/data/sentinel.conf
if [ ! -s "$memory" ]; then
  {
    sed "s/NAMESPACE/$NAMESPACE/" /etc/sentinel/sentinel.conf
    cat /etc/redis/secret/sentinel.conf
    echo "sentinel announce-ip $me"
  } >"$memory.draft"
  mv "$memory.draft" "$memory"
fi
exec valkey-server "$memory" --sentinel
