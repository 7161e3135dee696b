-- A worker leaves: allowed once it holds nothing.
-- ARGV: prefix, worker
-- Returns the number of jobs it still holds; 0 means it is gone.
local worker = ARGV[2]
local left = redis.call('SCARD', held_key(worker))
if left == 0 then
  redis.call('ZREM', prefix .. 'workers', worker)
  no_longer_preferred(worker)
  redis.call('DEL', prefix .. 'worker:' .. worker)
  forget_wants(worker)
  ring('kind', 'worker', 'id', worker)
end
return left
