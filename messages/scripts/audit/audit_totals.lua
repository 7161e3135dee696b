-- The pool's counters and what they count, in one step. Changes nothing.
-- ARGV: prefix, most, *clients
-- most: jobs whose bytes are added up. clients: those with open jobs.
-- Returns {load's fields and values, jobs in the clients' sets, bytes of those (-1: too many to add up), bytes of their
--   saved pieces (the same), sum of the unread hash, bytes of dead letters}
local most = tonumber(ARGV[2])
local jobs, bytes, saved, unread, letters = 0, 0, 0, 0, 0
for i = 3, #ARGV do jobs = jobs + redis.call('SCARD', client_key(ARGV[i])) end
if jobs > most then
  bytes, saved = -1, -1
else
  for i = 3, #ARGV do
    for _, id in ipairs(redis.call('SMEMBERS', client_key(ARGV[i]))) do
      local f = redis.call('HMGET', job_key(id), JOB.nbytes, JOB.saved)
      bytes, saved = bytes + (tonumber(f[1]) or 0), saved + (tonumber(f[2]) or 0)
    end
  end
end
for _, value in ipairs(redis.call('HVALS', KEY.unread)) do unread = unread + (tonumber(value) or 0) end
for _, letter in ipairs(redis.call('ZRANGE', letters_key, 0, -1)) do
  letters = letters + (tonumber(string.match(letter, ' (%d+)$')) or 0)
end
return {redis.call('HGETALL', load_key), jobs, bytes, saved, unread, letters}
