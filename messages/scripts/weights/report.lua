-- How a transfer ended on one worker. The first one that serves a version commits it.
-- ARGV: prefix, epoch, worker, report, serves, version, remember_s, digest, holder
-- report: JSON. serves: 1 if the worker now serves the version. version: <name>@<version> of an adapter. digest: of its
-- tensors. holder: JSON of where the worker offers it to others, '' if it does not.
-- Only the sender hears of it: a ring would wake every worker.
-- Returns {committed if it was the first, else ok or unknown; jobs that wait for a version up to this one}
local key = KEY.epoch .. ARGV[2]
if redis.call('EXISTS', key) == 0 then return {'unknown', 0} end
redis.call('HSET', key, 'report:' .. ARGV[3], ARGV[4])
redis.call('XADD', KEY.transfers, 'MAXLEN', '~', 1024, '*', 'epoch', ARGV[2], 'worker', ARGV[3], 'report', ARGV[4])
if ARGV[5] ~= '1' then return {'ok', 0} end
local first = commit(ARGV[6], ARGV[2], ARGV[7], ARGV[8])
if ARGV[9] ~= '' and redis.call('HGET', KEY.weights, 'committed') == ARGV[6] then
  redis.call('HSET', KEY.holders, ARGV[3], ARGV[9])
end
local waiting, version = 0, tonumber(ARGV[6])   -- nil for an adapter: any job may be for it
for class = 0, CLASSES - 1 do
  waiting = waiting + redis.call('ZCOUNT', later_key(class), 1, version or '+inf')
  if version then waiting = waiting + redis.call('ZCOUNT', later_key(class), exact_score(version), exact_score(version)) end
end
return {first and 'committed' or 'ok', waiting}
