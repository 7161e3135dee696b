-- A worker gives a job up for good: it is refused or not readable.
-- ARGV: prefix, worker, job_id, attempt, cause, host, error
-- Returns ok or fenced.
if not owns(ARGV[3], ARGV[2], ARGV[4]) then return 'fenced' end
-- What somebody asked a gateway is told to that client, and no operator will ask it again.
local of_gateway = string.find(redis.call('HGET', job_key(ARGV[3]), JOB.client) or '', '/gw%-')
if ARGV[5] == 'refused' and of_gateway then
  fail(ARGV[3], 'dead', ARGV[5], ARGV[6], ARGV[7])
else
  dead_letter(ARGV[3], ARGV[5], ARGV[6], ARGV[7])
end
return 'ok'
