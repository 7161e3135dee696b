-- A worker stops a job whose deadline passed while it was running.
-- ARGV: prefix, worker, job_id, attempt
-- Returns ok or fenced.
if not owns(ARGV[3], ARGV[2], ARGV[4]) then return 'fenced' end
fail(ARGV[3], 'expired', 'its deadline passed while it was running', '', '')
return 'ok'
