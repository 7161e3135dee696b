-- Delete a session with its turns. That it was forgotten is remembered for an hour, so that no late turn begins it again.
-- ARGV: prefix, session
-- Returns 1, also for one that was forgotten already; 0 if there is no such session.
local FORGOTTEN_TTL_S = 3600
local key = KEY.session .. ARGV[2]
if redis.call('EXISTS', key) == 0 then return 0 end
if redis.call('HGET', key, SESSION.closed) ~= '2' then
  drop_session(ARGV[2])
  redis.call('HSET', key, SESSION.closed, '2')
  redis.call('EXPIRE', key, FORGOTTEN_TTL_S)
end
return 1
