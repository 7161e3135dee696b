-- This is put before every script, behind the other libraries: recorded sessions. A session's record, HASH KEY.session ..
-- <tenant>/<name>, has the fields SESSION. Only the home has sessions.

-- A session stays for so long from now on. Redis drops one that the index has lost, later.
local function keep_session(name, idle_ms)
  redis.call('ZADD', KEY.sessions, clock().now + idle_ms, name)
  redis.call('EXPIRE', KEY.session .. name, math.ceil(idle_ms / 500))
end

-- Delete a session. Returns whether it had been taken.
local function drop_session(name)
  local f = redis.call('HMGET', KEY.session .. name, SESSION.nbytes, SESSION.closed)
  redis.call('UNLINK', KEY.session .. name)
  redis.call('ZREM', KEY.sessions, name)
  redis.call('HINCRBY', load_key, 'session_bytes', -counted(f[1]))
  return f[2]
end

-- Sessions to which no turn came for their time end, up to so many. Those that nobody took are counted.
local EXPIRED_AT_ONCE = 16
local function expire_sessions()
  local now = string.format('%.0f', clock().deadlines)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEY.sessions, '-inf', now, 'LIMIT', 0, EXPIRED_AT_ONCE)) do
    if not drop_session(name) then redis.call('HINCRBY', load_key, 'sessions_expired', 1) end
  end
end
