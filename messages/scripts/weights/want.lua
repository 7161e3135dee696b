-- A worker that holds a lease asks for a transfer of the newest version, of the weights or of an adapter.
-- ARGV: prefix, worker, version, adapter
-- version: the one it has. adapter: what this is about, '' for the weights.
if not redis.call('ZSCORE', prefix .. 'workers', ARGV[2]) then return 'nolease' end
redis.call('HSET', prefix .. 'wanted', want_field(ARGV[2], ARGV[4]), ARGV[3])
ring('kind', 'want', 'id', ARGV[2])
return 'ok'
