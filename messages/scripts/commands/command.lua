-- Send a command to the workers that are alive now.
-- ARGV: prefix, command_id, worker, command, lasts_ms
-- worker: '' for all. command: an encoded Command. lasts_ms: for how long a worker may take it.
-- Returns the ids of the workers that it was sent to.
local key = KEY.command .. ARGV[2]
local known = redis.call('HGETALL', key)
local roster = {}
if #known > 0 then -- sent again, after its reply was lost
  for i = 1, #known, 2 do
    if string.sub(known[i], 1, 2) == 'w:' then roster[#roster + 1] = string.sub(known[i], 3) end
  end
  return roster
end
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEY.workers, '(' .. clock().leases, '+inf')) do
  if ARGV[3] == '' or ARGV[3] == worker then roster[#roster + 1] = worker end
end
if #roster == 0 then return roster end
redis.call('HSET', key, 'm', ARGV[4], 'until', clock().now + tonumber(ARGV[5]))
for _, worker in ipairs(roster) do redis.call('HSET', key, 'w:' .. worker, '') end
redis.call('PEXPIRE', key, ARGV[5])
ring('kind', 'command', 'worker', ARGV[3], 'id', ARGV[2])
return roster
