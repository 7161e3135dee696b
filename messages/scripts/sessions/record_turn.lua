-- Record a turn of a session. The first one begins the session.
-- ARGV: prefix, session, turn_key, frame, ends, begins, begins_ends, tokens, idle_ms, max_turns, max_tokens, max_bytes, max_pool
-- session: <tenant>/<name>. frame, ends, begins: as SESSION has them; begins is '' for none. begins_ends: `ends` of the turn
-- that begins names. tokens: of the turn's prompt and output. idle_ms: how long the session stays. max_pool: bytes of all.
-- Returns ok, also for a turn that is in already; why it is refused (taken, turns, tokens, bytes, pool); or again: the turn
-- that it begins with is not there.
local TURN_BYTES = 512   -- what a turn takes beside its frame
local name, turn_key, frame, begins = ARGV[2], ARGV[3], ARGV[4], ARGV[6]
local key = KEY.session .. name
local f = redis.call('HMGET', key, SESSION.key .. turn_key, SESSION.closed, SESSION.turns, SESSION.tokens, SESSION.nbytes)
if f[1] then return 'ok' end
if f[2] then return 'taken' end
local turns, tokens, bytes, more = counted(f[3]), counted(f[4]) + ARGV[8], counted(f[5]), #frame + TURN_BYTES
if turns >= tonumber(ARGV[10]) then return 'turns' end
if tokens > tonumber(ARGV[11]) then return 'tokens' end
if bytes + more > tonumber(ARGV[12]) then return 'bytes' end
if counted(redis.call('HGET', load_key, 'session_bytes')) + more > tonumber(ARGV[13]) then
  if redis.call('ZCARD', KEY.sessions) > 0 then return 'pool' end
  redis.call('HSET', load_key, 'session_bytes', 0)   -- somebody has written into the counter, or lost the index
end
if begins ~= '' then
  if redis.call('HGET', key, SESSION.ends .. match(begins, '^%d+')) ~= ARGV[7] then return 'again' end
  redis.call('HSET', key, SESSION.begins .. turns, begins)
end
local now = clock().now
redis.call('HSET', key, SESSION.frame .. turns, frame, SESSION.ends .. turns, ARGV[5], SESSION.key .. turn_key, turns,
           SESSION.turns, turns + 1, SESSION.tokens, tokens, SESSION.nbytes, bytes + more, SESSION.last, now)
if turns == 0 then redis.call('HSET', key, SESSION.first, now) end
keep_session(name, ARGV[9])
redis.call('HINCRBY', load_key, 'session_bytes', more)
return 'ok'
