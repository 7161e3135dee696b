-- A worker's answer to a command; the first one stays.
-- ARGV: prefix, command id, worker id, encoded CommandReply, seconds for which answers are kept
local key = prefix .. 'answers:' .. ARGV[2]
if redis.call('HEXISTS', key, ARGV[3]) == 0 then
  redis.call('HSET', key, ARGV[3], ARGV[4])
  redis.call('EXPIRE', key, ARGV[5])
end
return 'ok'
