-- Store a worker's answer to a command. The first answer stays.
-- ARGV: prefix, command_id, worker, reply, keep_s
-- reply: an encoded CommandReply. keep_s: for how long answers are kept.
local key = prefix .. 'answers:' .. ARGV[2]
if redis.call('HEXISTS', key, ARGV[3]) == 0 then
  redis.call('HSET', key, ARGV[3], ARGV[4])
  redis.call('EXPIRE', key, ARGV[5])
end
return 'ok'
