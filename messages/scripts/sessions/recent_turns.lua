-- The `ends` of a session's newest turns. Changes nothing.
-- ARGV: prefix, session, most
-- Returns {number of the first of them, its ends, the next one's, ...}; {0} if there are none.
local key = KEY.session .. ARGV[2]
local turns = counted(redis.call('HGET', key, SESSION.turns))
local found = {math.max(0, turns - tonumber(ARGV[3]))}
for turn = found[1], turns - 1 do append(found, redis.call('HGET', key, SESSION.ends .. turn) or '') end
return found
