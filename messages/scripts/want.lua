-- A worker that holds a lease asks for a transfer of the newest version.
-- ARGV: prefix, worker id, version it has
if not redis.call('ZSCORE', prefix .. 'workers', ARGV[2]) then return 'nolease' end
redis.call('HSET', prefix .. 'wanted', ARGV[2], ARGV[3])
ring('kind', 'want', 'id', ARGV[2])
return 'ok'
