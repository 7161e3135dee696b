-- This is put before every script, and the other libraries after it: how scripts call Redis, how they read numbers, and the clock.
-- The first ARGV is always the pool's key prefix. KEYS[1] is the pool's `load` hash, which routes the script on a cluster.
-- Every other key has the same hash tag.
local prefix = ARGV[1]
local load_key = KEYS[1]
local MS_DIGITS = 14           -- of the time in an entry's id: it tells years up to 5138
local ASIDE_TTL_S = 86400      -- how long a key is kept that was set aside
local ASIDE_ENTRIES = 1024

local server = redis

-- Make `key` usable again for a command that was refused because of what somebody had put there. A key of a wrong type
-- is renamed to aside:<name>, and counts as empty from then on. So is a stream with the highest id there is, to which
-- nothing can be added; its entries, up to ASIDE_ENTRIES, are put into a new one. Those behind an id of a time that no
-- clock tells get new ids, or the new one would be full soon, too. A counter begins at 0.
local function mend(why, command, key, field)
  local wrong_type, full = string.find(why, 'WRONGTYPE', 1, true), string.find(why, 'exhausted', 1, true)
  if command == 'HINCRBY' and not wrong_type then server.call('HDEL', key, field) end
  local aside = KEY.aside .. string.sub(key, #prefix + 1)
  if not (wrong_type or full) or server.pcall('RENAME', key, aside).err then return end
  server.call('EXPIRE', aside, ASIDE_TTL_S)
  server.pcall('HINCRBY', load_key, 'aside', 1)
  for _, entry in ipairs(full and server.call('XRANGE', aside, '-', '+', 'COUNT', ASIDE_ENTRIES) or {}) do
    local real = #string.match(entry[1], '^%d+') <= MS_DIGITS
    server.pcall('XADD', key, real and entry[1] or '*', unpack(entry[2]))
  end
end

-- What one party has put into Redis stops nobody else: a command that meets it is given a second time, see mend.
local try, type, match, tonumber = server.pcall, type, string.match, tonumber   -- found faster than as globals
local redis = {pcall = try, call = function(...)
  local answer = try(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  mend(answer.err, ...)
  return server.call(...)
end}

-- Run `f`. Returns true and its answer, or false and why one party's data is in its way. Raises what Redis refuses for
-- reasons of its own (memory, disk, permissions): that is not about this entry.
local function attempt(f, ...)
  local fine, answer = pcall(f, ...)
  if fine then return true, answer end
  local why = type(answer) == 'table' and answer.err or tostring(answer)
  for _, cause in ipairs({'WRONGTYPE', 'exhausted', 'not an integer', 'overflow', 'attempt to ', 'bad argument', 'must be'}) do
    if string.find(why, cause, 1, true) then return false, why end
  end
  error(answer, 0)
end

-- A number as all numbers of a record are written, or nil: digits, few enough for Lua to be exact.
local function digits(text) return text and #text <= 15 and match(text, '^%d+$') end
local function whole(text) return tonumber(digits(text) or nil) end

-- What a counter says; 0 if it says no whole number.
local function counted(text)
  local number = tonumber(text) or 0
  return number % 1 == 0 and math.abs(number) < 1e15 and number or 0
end

-- Redis' own clock. For people, and for what nobody watched: it may be stepped, and is another host's after a failover.
local function redis_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The pool's clock, HASH <prefix>clock, in ms. It neither steps nor jumps: only a witness moves it, who has counted by
-- its own monotonic clock since it last heard of it. Redis' clock bounds that, so a witness that is too fast does no harm.
-- One that is too slow does none either, as long as there is another: the clock is where the furthest witness says.
--   at     what was witnessed, beginning with Redis' time. Leases follow it.
--   seen   Redis' time at that moment. A step back moves it; so does a step forward that a witness contradicts.
--   slept  what passed while nobody was there to watch, as Redis' clock told it. Deadlines follow at + slept.
--   ticked Redis' time when it was last moved; `seen` may stay behind for good, where Redis' clock has stepped forward a little
--   until  the last lease ends then   reaped  a heartbeat was last told to reap
--   gap    what Redis' clock says has passed before somebody came who had not been there, though others may have been:
--          it is slept if one of these saw it pass (they heard of `at` up to gap_at), or if none of their leases, up to
--          gap_end, is left; and it never was if one of them comes and did not see it.
local clock_key = KEY.clock
local UNWITNESSED_MS = 2000    -- so much is believed of Redis' clock without a witness
local STEP_MS = 15000          -- longer than the oldest copy of a call that may arrive: a difference beyond is a step

local the_clock
local function clock()
  if not the_clock then
    local c = redis.call('HMGET', clock_key, 'at', 'slept', 'seen')
    local at, slept, seen, redis_now = whole(c[1]), whole(c[2]) or 0, whole(c[3]), redis_ms()
    local since = at and seen and math.max(0, math.min(redis_now - seen, 1000)) or 0
    -- leases, deadlines: what is certain to have passed. now: with what has probably passed since then, 1 s at most.
    the_clock = at and {leases = at, deadlines = at + slept, now = at + slept + since}
      or {leases = 0, deadlines = 0, now = redis_now}
  end
  return the_clock
end

-- Move the clock on. heard, passed: what the caller last heard of `at`, nil if nothing, and the ms since then.
-- Returns `at`, `until` and `reaped`.
local function tick(heard, passed)
  local c = redis.call('HMGET', clock_key, 'at', 'seen', 'slept', 'gap', 'gap_at', 'gap_end', 'until', 'reaped')
  local redis_now, witnessed = redis_ms(), heard and passed and heard + passed
  local at, seen, slept, gap = whole(c[1]) or witnessed or redis_now, whole(c[2]) or redis_now, whole(c[3]) or 0, whole(c[4]) or 0
  local gap_at, gap_end = whole(c[5]) or 0, whole(c[6]) or 0
  if redis_now < seen then seen = redis_now end
  local beat = redis_now - seen
  if gap > 0 and (not witnessed or heard > gap_at) then
    if at >= gap_end then slept, gap = slept + gap, 0 end
  elseif gap > 0 then
    slept, gap = slept + math.min(gap, math.max(0, witnessed - at - beat)), 0
  end
  if witnessed then
    local on = math.max(0, math.min(beat, witnessed - at))
    at, seen = at + on, seen + on
    if on > 0 and beat - on > STEP_MS then seen = redis_now end
  elseif beat <= UNWITNESSED_MS then
    at, seen = at + beat, redis_now
  else
    -- 1 ms later, to tell who heard of the clock before the gap from who hears of it from now on.
    gap, gap_at, gap_end, at, seen = gap + beat, at, whole(c[7]) or 0, at + 1, redis_now
    if at > gap_end then slept, gap = slept + gap, 0 end
  end
  redis.call('HSET', clock_key, 'at', at, 'seen', seen, 'slept', slept, 'gap', gap, 'gap_at', gap_at, 'gap_end', gap_end,
    'ticked', redis_now)
  local since = math.max(0, math.min(redis_now - seen, 1000))
  the_clock = {leases = at, deadlines = at + slept, now = at + slept + since}
  return at, whole(c[7]) or 0, whole(c[8]) or 0
end
