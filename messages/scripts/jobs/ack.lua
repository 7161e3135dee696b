-- Delete outcomes that the client has safe from its reply stream.
-- ARGV: prefix, client, *entries (entry_id, nbytes)
-- nbytes: the bytes that the entry was counted for.
local client = ARGV[2]
local reply = prefix .. 'reply:' .. client
local bytes = 0
for i = 3, #ARGV, 2 do
  if redis.call('XDEL', reply, ARGV[i]) == 1 then bytes = bytes + tonumber(ARGV[i + 1]) end
end
if bytes > 0 then count_unread(client, -bytes) end
if redis.call('XLEN', reply) == 0 then nothing_unread(client) end
return 'ok'
