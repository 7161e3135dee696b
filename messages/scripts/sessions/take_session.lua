-- Take a session: from now on it takes no further turns.
-- ARGV: prefix, session, start, idle_ms
-- start: number of the first turn to return. idle_ms: for how long the session stays.
-- Returns {how many turns it has, per turn from `start` on: its begins, its frame}; MOST of them, and after MAX_BYTES no
-- further one. Alone: 0 if there is no such session, 1 if it was forgotten.
local MAX_BYTES = 4194304
local MOST = 256
local name, start, bytes = ARGV[2], tonumber(ARGV[3]), 0
local key = KEY.session .. name
local f = redis.call('HMGET', key, SESSION.turns, SESSION.closed)
if f[2] == '2' then return {1} end
local turns = counted(f[1])
if turns == 0 then return {0} end
redis.call('HSET', key, SESSION.closed, '1')
keep_session(name, ARGV[4])
local found = {turns}
for turn = start, math.min(turns, start + MOST) - 1 do
  if bytes >= MAX_BYTES then break end
  local its = redis.call('HMGET', key, SESSION.begins .. turn, SESSION.frame .. turn)
  append(found, its[1] or '', its[2] or '')
  bytes = bytes + #(its[2] or '')
end
return found
