-- Open a weight transfer.
-- ARGV: prefix, epoch, version, announcement, remember_s, told, digest
-- told: the announcement as text. The bell says it, so that nobody has to ask for it. digest: of the version's tensors.
-- It may be told again if what it says has changed.
-- Returns ok; closed if the transfer is over; or taken: other weights have the number, or a higher one.
local key = KEY.epoch .. ARGV[2]
local state = redis.call('HGET', key, 'st')
if state == 'closed' then return state end   -- a delayed copy
local version = KEY.version .. ARGV[3]
local weights, name, number = KEY.weights, string.match(ARGV[3], '^(.*)@(%d+)$')
local field = name and 'highest:' .. name or 'highest'
number = tonumber(number or ARGV[3])
-- A number that was announced is never given to other tensors: some worker may have them under it, committed or not.
-- The same tensors may come again, as long as no worker is known to have them, and no later ones came.
local highest, before = tonumber(redis.call('HGET', weights, field)) or 0, redis.call('HMGET', version, 'digest', 'st')
local again = number == highest and before[1] == ARGV[7] and ARGV[7] ~= '' and before[2] ~= 'committed'
if not state and number <= highest and not again then return 'taken' end
redis.call('HSET', key, 'm', ARGV[4], 'st', 'open')
if state == 'open' then ring('kind', 'weights', 'epoch', ARGV[2], 'told', ARGV[6]) return 'ok' end
redis.call('EXPIRE', key, ARGV[5])
redis.call('UNLINK', epoch_before(ARGV[2]))
redis.call('HSET', weights, 'open', ARGV[2])
if not redis.call('HGET', version, 'st') then redis.call('HSET', version, 'st', 'announced', 'at', redis_ms()) end
redis.call('HSET', version, 'digest', ARGV[7])
redis.call('EXPIRE', version, ARGV[5])
redis.call('HSET', weights, field, number)
ring('kind', 'weights', 'epoch', ARGV[2], 'told', ARGV[6])
return 'ok'
