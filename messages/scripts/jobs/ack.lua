-- Delete outcomes that the client has safe from its reply stream.
-- ARGV: prefix, client, owner, *entries (entry_id, nbytes)
-- owner: the caller's entry in `reader:<client>`, '' for anybody. nbytes: the bytes that the entry was counted for.
-- Returns ok; or replaced, and nothing was deleted: there is a later owner, who may not have read them.
local client, owner = ARGV[2], ARGV[3]
if owner ~= '' and #redis.call('XREVRANGE', KEY.reader .. client, '+', '(' .. owner, 'COUNT', 1) > 0 then
  return 'replaced'
end
local reply = KEY.reply .. client
local bytes = 0
for i = 4, #ARGV, 2 do
  if redis.call('XDEL', reply, ARGV[i]) == 1 then bytes = bytes + tonumber(ARGV[i + 1]) end
end
if bytes > 0 then
  count_unread(client, -bytes)
  redis.call('HINCRBY', load_key, 'taken', bytes)
end
if redis.call('XLEN', reply) == 0 then nothing_unread(client) end
return 'ok'
