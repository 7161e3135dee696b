-- A worker gives a job up for good: it is refused or not readable.
-- ARGV: prefix, worker, job_id, attempt, cause, host, error
-- Returns ok or fenced.
if not owns(ARGV[3], ARGV[2], ARGV[4]) then return 'fenced' end
dead_letter(ARGV[3], ARGV[5], ARGV[6], ARGV[7])
return 'ok'
