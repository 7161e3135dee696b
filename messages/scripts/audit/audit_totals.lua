-- The pool's counters and what they count, in one step. Changes nothing.
-- ARGV: prefix, most, *clients
-- most: jobs whose bytes are added up. clients: those with open jobs.
-- Returns {load's fields and values, jobs in the clients' sets, bytes of those (-1: too many to add up), sum of the
--   unread hash}
local most = tonumber(ARGV[2])
local jobs, bytes, unread = 0, 0, 0
for i = 3, #ARGV do jobs = jobs + redis.call('SCARD', client_key(ARGV[i])) end
if jobs > most then
  bytes = -1
else
  for i = 3, #ARGV do
    for _, id in ipairs(redis.call('SMEMBERS', client_key(ARGV[i]))) do
      bytes = bytes + (tonumber(redis.call('HGET', job_key(id), 'z')) or 0)
    end
  end
end
for _, value in ipairs(redis.call('HVALS', prefix .. 'unread')) do unread = unread + (tonumber(value) or 0) end
return {redis.call('HGETALL', load_key), jobs, bytes, unread}
