-- Give queued jobs to a worker that holds a lease.
-- ARGV: prefix, worker, claim, max_jobs, max_samples, version, classes, can, *adapters (name, version)
-- claim: number of this claim. version: of the worker's weights. classes: how many priority classes there are.
-- can: what the worker's engine can do, in the form of a job's N; '' for a worker that tries everything.
-- adapters: those that the worker has, each with its newest version.
-- Returns {'NOLEASE'}, or a flat list, per job: id, attempt, samples, queued ms, ms to the deadline ('' for none),
--   payload, then a list of its progress: s<i>, '' for a published sample; k<i> or k<i>.<j>, bytes for a partial; and
--   first x, '' if the worker only ends the job with these (see stop)
-- A repeated claim number returns the jobs of that claim that are still held. A client library that re-sends after a
-- lost reply thus gets the same jobs instead of the next ones. An older number comes from a delayed copy of a call and
-- returns nothing.
local worker, number = ARGV[2], ARGV[3]
local max_jobs, max_samples, version, classes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local SCAN = 64               -- entries one claim looks at beyond what it takes
local MAX_BYTES = 8388608     -- of payloads and partials, after which one claim takes no further job
local FIELD_BYTES = 2048      -- a published sample or a piece counts for so many at least
local WARD_MS = 10000         -- somebody else may have the turn when its ward has not claimed for so long
local WARD_TTL_S = 7200       -- by Redis' clock, and only so that nothing is left in a pool without workers
local SHARE = 8               -- a class gets its turn when this many jobs of higher ones went past it
local worker_key = prefix .. 'worker:' .. worker
if not alive(worker) then
  leave_to_others(worker)
  return {'NOLEASE'}
end

local ADAPTER = 1099511627776  -- 2^40; weights versions above it count as it

local FIELDS = {'p', 'a', 't', 'e', 'd', 'st', 'n', 'kk', 'v', 'g', 'w', 'l', 'P', 'x', 'y', 'q', 'N'}
local function record(id) return redis.call('HMGET', job_key(id), unpack(FIELDS)) end

local function wrong_in(f) return damaged(f[1], f[2], f[3], f[4], f[5], f[7], f[15], f[16]) end

local given, bytes = {}, 0
-- What there is of a job already. Raises if its published samples are not as many as its record says, see must_agree, or
-- if they are all that it has.
local function progress_of(id, f)
  local progress, published = f[14] and {'x', ''} or {}, 0
  if f[8] or tonumber(f[5]) > 0 then
    local all = redis.call('HGETALL', job_key(id))
    for i = 1, #all, 2 do
      -- s<sample>, k<sample> and k<sample>.<number>; what else there may be is nobody's progress.
      local kind, sample, number = string.match(all[i], '^([sk])(%d+)%.?(%d*)$')
      if kind and whole(sample) and whole(sample) < tonumber(f[7]) and (number == '' or (kind == 'k' and whole(number)))
        and string.sub(all[i], -1) ~= '.' then
        local content = kind == 'k' and all[i + 1] or ''
        append(progress, all[i], content)
        bytes = bytes + math.max(#content, FIELD_BYTES)
        published = published + (kind == 's' and 1 or 0)
      end
    end
    if published ~= tonumber(f[5]) or published >= tonumber(f[7]) then error(UNEVEN) end
  end
  return progress
end

local function hand_over(id, f, progress)
  local now, i = clock().now, #given
  bytes = bytes + #f[1]
  given[i + 1], given[i + 2], given[i + 3], given[i + 4] = id, f[2] + 0, f[7], math.max(0, now - f[3])
  given[i + 5], given[i + 6], given[i + 7] = f[4] and f[4] - now or '', f[1], progress
end

local last = redis.call('HMGET', worker_key, 'claim', 'ids', 'alone', 'number')
if last[1] == number then
  for id in string.gmatch(last[2] or '', '%x+') do
    local f = record(id)
    if f[6] == 'r' and f[11] == worker and not wrong_in(f) then
      alone(id, function() hand_over(id, f, progress_of(id, f)) end)
    end
  end
  return given
end
if (whole(last[1]) or 0) > tonumber(number) then return given end

local committed = whole(redis.call('HGET', prefix .. 'weights', 'committed')) or 0
local ids, jobs, samples, looked, again = {}, 0, 0, 0, 0

local function version_needed(v, g)
  return math.max(tonumber(v) or 0, g and committed - tonumber(g) or 0)
end

-- Scores in `later` that this worker can serve: {from, to} each.
local has, ranges = {}, {{0, math.min(version, ADAPTER - 1)}}
local function number_of(adapter) return whole(redis.call('HGET', prefix .. 'weights', 'number:' .. adapter)) end
for i = 9, #ARGV - 1, 2 do
  has[ARGV[i]] = tonumber(ARGV[i + 1])
  local number = number_of(ARGV[i])
  if number then ranges[#ranges + 1] = {ADAPTER * number, ADAPTER * number + has[ARGV[i]]} end
end
if whole(last[4]) then ranges[#ranges + 1] = {-last[4], -last[4]} end   -- what prefers this worker

-- Workers of one pool may differ in what their engines can do. HASH `needs`, in a pool where they do:
--   can:<what a worker can>   until when, by the pool's clock, the last lease of such workers goes
--   slot:<names>              the number under which jobs wait in `later` that need these names, and more context than 0
-- A job waits for workers that are there, or were within REMEMBER_MS. One that nobody could run goes to anybody, who
-- refuses it by name.
local REMEMBER_MS, SLOTS = 3600000, 256
local KINDS = 512              -- while there are more kinds of workers, each is forgotten with its last lease
local PLAIN = '0 generate'     -- what a job needs that does not say
local function parsed(text)
  local context, names = string.match(text, '^(%d+) (.+)$')
  if not whole(context) then error('what an engine can do must be a length and names') end
  local found = {context = math.min(context + 0, SLOT - 1), names = names, has = {}}
  for name in string.gmatch(names, '%S+') do found.has[name] = true end
  return found
end
local function can_all(names, has)
  for name in string.gmatch(names, '%S+') do
    if not has[name] then return false end
  end
  return true
end
local function token_of(can) return 'can-' .. string.sub(server.sha1hex(can), 1, 16) end

local can = (ARGV[8] or '') ~= '' and parsed(ARGV[8])
local others, slots, slots_used, slots_here = {}, {}, 0, 0
local known = can and redis.call('HGETALL', needs_key) or {}
local since = clock().leases - (#known > 2 * (SLOTS + KINDS) and 0 or REMEMBER_MS)
local alike = #known == 2 and known[1] == 'can:' .. ARGV[8]   -- all workers are of this one's kind
for i = 1, alike and 0 or #known, 2 do
  local kind, text = string.match(known[i], '^(%a+):(.+)$')
  local value = whole(known[i + 1])
  if kind == 'can' and value and value > since then
    others[#others + 1] = {text = text, alive = value > clock().leases, does = {}}
  elseif kind == 'can' then
    redis.call('HDEL', needs_key, known[i])
  elseif kind == 'slot' and value then
    slots[text], slots_used = value, slots_used + 1
    if can_all(text, can.has) then
      slots_here = slots_here + 1
      ranges[#ranges + 1] = {NEEDS + value * SLOT, NEEDS + value * SLOT + can.context}
    end
  end
end

-- Whether these other workers can do what is needed. Most claims ask for no other worker, and few for many needs.
local function can_do(other, need)
  if not other.context then
    local fine, one = attempt(parsed, other.text)
    other.context, other.has = fine and one.context or -1, fine and one.has or {}
  end
  if need.context > other.context then return false end
  if other.does[need.names] == nil then other.does[need.names] = can_all(need.names, other.has) end
  return other.does[need.names]
end

-- The number of the slot of these names; nil if there are too many slots. A claim looks once for those that are empty.
local swept = false
local function slot_of(names)
  if slots[names] then return slots[names] end
  local crowded = slots_used >= SLOTS and not swept
  swept = swept or crowded
  for used, value in pairs(crowded and slots or {}) do
    local waits = 0
    for class = 0, classes - 1 do
      waits = waits + redis.call('ZCOUNT', later_key(class), NEEDS + value * SLOT, NEEDS + (value + 1) * SLOT - 1)
    end
    if waits == 0 then
      redis.call('HDEL', needs_key, 'slot:' .. used)
      slots[used], slots_used = nil, slots_used - 1
    end
  end
  if slots_used >= SLOTS then return nil end
  slots[names], slots_used = redis.call('HINCRBY', load_key, 'slots', 1), slots_used + 1
  redis.call('HSET', needs_key, 'slot:' .. names, slots[names])
  return slots[names]
end

-- Where in `later` a job waits whose needs only other workers fulfil, and these are woken; false if it need not. NO_SLOT
-- if there is no place: it waits at the end of its queue.
local scores, NO_SLOT = {}, math.huge
local function score_for_others(n)
  n = n or PLAIN
  if scores[n] == nil then
    local need = parsed(n)
    local waits = false
    if need.context > can.context or not can_all(need.names, can.has) then
      for _, other in ipairs(others) do
        if can_do(other, need) then
          waits = true
          if other.alive and not other.woken then wake(token_of(other.text)) end
          other.woken = true
        end
      end
    end
    local slot = waits and slot_of(need.names)
    scores[n] = waits and (slot and NEEDS + slot * SLOT + need.context or NO_SLOT)
  end
  return scores[n]
end

-- Where in `later` a job waits that this worker cannot run; nil for one that it can. An adapter that the pool has no
-- version of keeps nobody waiting: the worker finds that out, and ends the job.
local function score_of(v, g, l, n)
  local for_others = #others > 0 and score_for_others(n)
  if for_others then return for_others end
  local needs = version_needed(v, g)
  if version < needs then return math.min(needs, ADAPTER - 1) end
  if not l then return nil end
  local adapter, least = string.match(l, '^(.+)@(%d+)$')
  least = math.max(1, least + 0)               -- raises for what is no adapter's version
  local number = (has[adapter] or 0) < least and number_of(adapter)
  return number and ADAPTER * number + math.min(least, ADAPTER - 1) or nil
end

-- Whether a job, with the preference P, was put aside for another worker: one with a lease, if the job has never been
-- claimed and its time is not over. That worker has a number from then on, which is the score minus itself.
local function leave_to_preferred(id, preference, attempt, accepted, later)
  local ms, other = string.match(preference, '^(%d+)@(.+)$')
  local until_ms = tonumber(accepted) + (whole(ms) or 0)
  if other == worker or attempt ~= '0' or until_ms <= clock().deadlines or not alive(other) then return false end
  local its_key = prefix .. 'worker:' .. other
  local its_number = whole(redis.call('HGET', its_key, 'number'))
  if not its_number then
    its_number = redis.call('HINCRBY', load_key, 'numbers', 1)
    redis.call('HSET', its_key, 'number', its_number)
  end
  redis.call('ZADD', later, -its_number, id)
  redis.call('ZADD', prefers_key, until_ms, id)
  wake(other)
  return true
end

-- What becomes of an id that was taken from a queue.
local function settle(id, later)
  if not string.match(id, '^%x+$') then return end       -- nobody submitted that
  local f = record(id)
  if f[6] == 'r' or ENDED[f[6]] or not (f[6] or f[1]) then return end   -- it was cancelled or expired while queued
  local wrong = f[6] ~= 'q' and 'st' or wrong_in(f)
  if wrong then return give_up(id, string.format(DAMAGED, wrong)) end
  if f[13] then redis.call('ZREM', prefers_key, id) end
  local score = not f[14] and score_of(f[9], f[10], f[12], f[17])   -- what only has to be ended needs no weights
  if f[4] and tonumber(f[4]) <= clock().deadlines then
    fail(id, 'expired', 'its deadline passed in the queue', '', '')
  elseif score == NO_SLOT then
    redis.call('RPUSH', queue_key(f[16]), id)
  elseif score then
    redis.call('ZADD', later, score, id)       -- out of the way of those behind it
    if score >= NEEDS and not f[17] then redis.call('HSET', job_key(id), 'N', PLAIN) end
  elseif f[14] or not (f[13] and leave_to_preferred(id, f[13], f[2], f[3], later)) then
    local progress = progress_of(id, f)
    f[2] = f[2] + 1
    redis.call('HSET', job_key(id), 'st', 'r', 'w', worker, 'a', f[2])
    redis.call('SADD', held_key(worker), id)
    jobs = jobs + 1
    samples = samples + f[7] - f[5]
    ids[#ids + 1] = id
    if f[2] > 1 then again = again + 1 end
    hand_over(id, f, progress)
  end
end
local function consider(id, later)
  looked = looked + 1
  alone(id, settle, id, later)
end

local function remember()
  if jobs > 0 then redis.call('HINCRBY', load_key, 'attempts', jobs) end
  if again > 0 then redis.call('HINCRBY', load_key, 'redelivered', again) end
  redis.call('HSET', worker_key, 'claim', number, 'ids', table.concat(ids, ','))
  return given
end

-- One worker at a time is the ward for suspects: it lets what it holds run out, then takes them one by one.
local ward_key, alone_with = prefix .. 'ward', last[3]
local function ward()
  local until_ms, holder = string.match(redis.call('GET', ward_key) or '', '^(%d+)@(.*)$')
  return whole(until_ms) and whole(until_ms) > clock().leases and holder or nil
end
local function be_ward()
  redis.call('SET', ward_key, clock().leases + WARD_MS .. '@' .. worker, 'EX', WARD_TTL_S)
end
if alone_with and redis.call('SISMEMBER', held_key(worker), alone_with) == 1 then
  if ward() == worker then be_ward() end
  return remember()
end

-- The first suspect that this worker could run, and its class. Those that have ended are cleared away.
local function next_suspect()
  for _, id in ipairs(redis.call('LRANGE', suspects_key, 0, SCAN - 1)) do
    local f = redis.call('HMGET', job_key(id), 'st', 'v', 'g', 'q', 'l', 'x', 'N')
    if f[1] ~= 'q' then
      redis.call('LREM', suspects_key, 1, id)
    else
      local fine, score = attempt(score_of, f[2], f[3], f[5], f[7])
      if not fine or not whole(f[4]) or whole(f[4]) >= classes then
        redis.call('LREM', suspects_key, 1, id)
        give_up(id, 'its class or its adapter is no such thing')
      elseif f[6] or not score then
        return id, f[4]
      end
    end
  end
end

if redis.call('LLEN', suspects_key) > 0 then
  local id, class = next_suspect()
  if id and (ward() or worker) == worker then
    be_ward()
    while id and redis.call('SCARD', held_key(worker)) == 0 do
      redis.call('LREM', suspects_key, 1, id)
      consider(id, later_key(class))
      if jobs > 0 then redis.call('HSET', worker_key, 'alone', id) else id, class = next_suspect() end
    end
    if redis.call('SCARD', held_key(worker)) > 0 then return remember() end
  end
end

local function full()
  return jobs >= max_jobs or samples >= max_samples or bytes >= MAX_BYTES or looked >= max_jobs + SCAN
end

-- Up to `limit` jobs of a class, those first that were set aside for what this worker has. Each range is the first one in
-- its turn: none that is never empty keeps the others waiting. Returns how many.
local function take(class, limit)
  local queue, later, before = queue_key(class), later_key(class), jobs
  for i = 0, #ranges - 1 do
    if full() then break end
    local range = ranges[(i + number) % #ranges + 1]
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', later, range[1], range[2], 'LIMIT', 0, limit - jobs + before)) do
      if full() then break end
      redis.call('ZREM', later, id)
      consider(id, later)
    end
  end
  while jobs - before < limit and not full() do
    local id = redis.call('LPOP', queue)
    if not id then break end
    consider(id, later)
  end
  return jobs - before
end

-- Highest class first, but nobody starves: `owed<class>` counts the jobs of higher classes that went past a waiting one.
local taken, owed = {}, {}
for class = classes - 1, 1, -1 do
  owed[class] = whole(redis.call('HGET', load_key, 'owed' .. class)) or 0
  taken[class] = owed[class] >= SHARE and take(class, math.floor(owed[class] / SHARE)) or 0
end
local function adapter_job_waits(class)
  for i = 2, #ranges do
    if redis.call('ZCOUNT', later_key(class), ranges[i][1], ranges[i][2]) > 0 then return true end
  end
  return false
end
local passed, waiting = 0, false
for class = 0, classes - 1 do
  taken[class] = (taken[class] or 0) + take(class, max_jobs)
  -- Those set aside for newer weights wait, too, for a worker that has them.
  local waits = redis.call('LLEN', queue_key(class)) > 0 or redis.call('ZCOUNT', later_key(class), 0, version) > 0
    or adapter_job_waits(class)
  if class > 0 then
    local idle = not waits and redis.call('ZCARD', later_key(class)) == 0
    local now_owed = idle and 0 or math.max(0, owed[class] + (waits and passed or 0) - SHARE * taken[class])
    if now_owed ~= owed[class] then redis.call('HSET', load_key, 'owed' .. class, now_owed) end
  end
  passed, waiting = passed + taken[class], waiting or waits
end
if waiting and (jobs > 0 or looked >= max_jobs + SCAN) then
  wake()
  if slots_here > 0 then wake(token_of(ARGV[8])) end
end
return remember()
