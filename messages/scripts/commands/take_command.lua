-- A worker takes a command it was given: once, and only while the command lasts.
-- ARGV: prefix, command_id, worker, token
-- token: of this call.
-- Returns {encoded Command, milliseconds left}, or nothing.
local key, field = prefix .. 'command:' .. ARGV[2], 'w:' .. ARGV[3]
local by = redis.call('HGET', key, field)
if not by or (by ~= '' and by ~= ARGV[4]) then return {} end
if by == '' then redis.call('HSET', key, field, ARGV[4]) end
local command = redis.call('HGET', key, 'm')
return command and {command, redis.call('PTTL', key)} or {}
