-- A worker leaves: allowed once it holds nothing.
-- ARGV: prefix, worker
-- Returns the number of jobs it still holds; 0 means it is gone.
local worker = ARGV[2]
local left = redis.call('SCARD', held_key(worker))
if left == 0 then forget_worker(worker) end
return left
