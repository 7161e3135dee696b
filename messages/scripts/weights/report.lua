-- How a transfer ended on one worker.
-- ARGV: prefix, epoch, worker, report, serves, adapter
-- report: JSON. serves: 1 if the worker now serves the version. adapter: '' for the weights.
local key = prefix .. 'epoch:' .. ARGV[2]
if redis.call('EXISTS', key) == 0 then return 'unknown' end
redis.call('HSET', key, 'report:' .. ARGV[3], ARGV[4])
if ARGV[5] == '1' then redis.call('HDEL', prefix .. 'wanted', want_field(ARGV[3], ARGV[6])) end
ring('kind', 'report', 'epoch', ARGV[2])
return 'ok'
