-- A page of dead letters without their payloads, which may be large. Changes nothing.
-- ARGV: prefix, newest_first, begin, end, most, head_bytes
-- newest_first: 1 or 0. begin, end: entry ids as XRANGE takes them. most: entries. head_bytes: of each payload to show.
-- Returns per letter: entry id, payload bytes, its first bytes, {field, value, ...} of the rest
local newest_first = ARGV[2] == '1'
local page = redis.call(newest_first and 'XREVRANGE' or 'XRANGE', prefix .. 'dead', ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local found = {}
for _, entry in ipairs(page) do
  local payload, rest = '', {}
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'payload' then
      payload = entry[2][i + 1]
    else
      append(rest, entry[2][i], entry[2][i + 1])
    end
  end
  append(found, entry[1], #payload, string.sub(payload, 1, tonumber(ARGV[6])), rest)
end
return found
