-- A worker asks for a transfer of the newest version.
-- ARGV: prefix, worker id, version it has
redis.call('HSET', prefix .. 'wanted', ARGV[2], ARGV[3])
ring('kind', 'want', 'id', ARGV[2])
return 'ok'
