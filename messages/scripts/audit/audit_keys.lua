-- What keys are and whom they belong to, each looked at in one step. Changes nothing.
-- ARGV: prefix, *keys (name, worker)
-- name: without the prefix. worker: whom the key belongs to, '' for nobody.
-- Returns per key: type (none: gone), TTL in ms (-1: none), 1 if that worker is registered
local seen = {}

-- Were `workers` of a wrong type, that would be the fault, not each key of a worker.
local function registered(worker)
  return worker ~= '' and redis.pcall('ZSCORE', KEY.workers, worker) and 1 or 0
end

for i = 2, #ARGV, 2 do
  local key = prefix .. ARGV[i]
  append(seen, redis.call('TYPE', key).ok, redis.call('PTTL', key), registered(ARGV[i + 1]))
end
return seen
