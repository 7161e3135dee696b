-- Store a worker's answer to a command. The first answer stays.
-- ARGV: prefix, command_id, worker, reply, keep_s, most
-- reply: an encoded CommandReply. keep_s: for how long answers are kept. most: bytes of the answers of so long a time.
-- Returns ok; or full, and it was not stored. Short ones always are.
-- HASH `load` has in `answers` <when such a time began, s>@<bytes since>.
local SHORT = 16384
local key, keep_s, size = KEY.answers .. ARGV[2], tonumber(ARGV[5]), #ARGV[4]
if redis.call('HEXISTS', key, ARGV[3]) == 1 then return 'ok' end
local now = math.floor(redis_ms() / 1000)
local since, bytes = string.match(redis.call('HGET', load_key, 'answers') or '', '^(%d+)@(%d+)$')
since, bytes = whole(since), whole(bytes)
if not since or not bytes or now < since or now - since >= keep_s then since, bytes = now, 0 end
if bytes + size > tonumber(ARGV[6]) and size > SHORT then return 'full' end
redis.call('HSET', load_key, 'answers', string.format('%d@%d', since, bytes + size))
redis.call('HSET', key, ARGV[3], ARGV[4])
redis.call('EXPIRE', key, keep_s)
return 'ok'
