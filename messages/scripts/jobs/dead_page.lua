-- Dead letters without their payloads, which may be large. Changes nothing.
-- ARGV: prefix, newest_first, begin, end, most, head_bytes
-- newest_first: 1 or 0. begin, end: entry ids as XRANGE takes them. most: entries. head_bytes: of each payload to show.
-- Returns per letter: entry id, payload bytes, its first bytes, {field, value, ...} of the rest. There may be more than
--   these if there is any: after MAX_BYTES of payloads no further one is read.
local MAX_BYTES = 4194304
local newest_first, begin, last, bytes = ARGV[2] == '1', ARGV[3], ARGV[4], 0
local found = {}
for _ = 1, tonumber(ARGV[5]) do
  if bytes >= MAX_BYTES then break end
  local entry = redis.call(newest_first and 'XREVRANGE' or 'XRANGE', KEY.dead, begin, last, 'COUNT', 1)[1]
  if not entry then break end
  local payload, rest = '', {}
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'payload' then
      payload = entry[2][i + 1]
    else
      append(rest, entry[2][i], entry[2][i + 1])
    end
  end
  append(found, entry[1], #payload, string.sub(payload, 1, tonumber(ARGV[6])), rest)
  begin, bytes = '(' .. entry[1], bytes + #payload
end
return found
