-- Give queued jobs to a worker that holds a lease.
-- ARGV: prefix, worker, claim, max_jobs, max_samples, version, can, holds, pace, waited, *adapters (name, version)
-- claim: number of this claim. version: of the worker's weights. can: what the worker's engine can do, in the form of a
-- job's needs; '' for a worker that tries everything. holds: samples that the worker holds; '' for one that takes all it has
-- room for, whatever others have. pace: of its engine, see lib_spread.lua. waited: how many claims in a row gave nothing
-- because of the worker's share. adapters: those that the worker has, each with its newest version.
-- Returns {'NOLEASE'}, or a flat list: ms after which to claim again in any case (0: when there is a reason to), thousandths
--   of samples of its share (-1: no limit), and per job: id, attempt, samples, queued ms, ms to the deadline ('' for none),
--   payload, then fields of its record: a sample, '' for each published one; pieces; ending, '' if the worker only ends the
--   job with these (see stop); lost and moves; prefers, '' if it preferred a worker
-- A repeated claim number returns the jobs of that claim that are still held: a client library re-sends after a lost reply.
-- An older number comes from a delayed copy of a call and returns nothing.
local worker, number, worker_key = ARGV[2], ARGV[3], KEY.worker .. ARGV[2]
local max_jobs, max_samples, version = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local SCAN = 64               -- entries one claim looks at beyond what it takes
local MAX_BYTES = 8388608     -- of payloads and partials, after which one claim takes no further job
local FIELD_BYTES = 2048      -- a published sample or a piece counts for so many at least
local WARD_MS = 10000         -- somebody else may have the turn when its ward has not claimed for so long
local WARD_TTL_S = 7200       -- by Redis' clock, and only so that nothing is left in a pool without workers
local SHARE = 8               -- a class gets its turn when this many jobs of higher ones went past it
if not alive(worker) then
  leave_to_others(worker)
  return {'NOLEASE'}
end

-- f in all that follows: what a claim reads of a job's record; AT.<field> is the place of a field in it.
local function record(id) return redis.call('HMGET', job_key(id), AT.all) end

local given, bytes = {0, -1}, 0
-- What there is of a job already. Raises if its published samples are not as many as its record says, see must_agree, or
-- if they are all that it has.
local function progress_of(id, f)
  local progress, published, lost, moves = f[AT.ending] and {JOB.ending, ''} or {}, 0, false, false
  if f[AT.attempt] ~= '0' then
    lost, moves = unpack(redis.call('HMGET', job_key(id), JOB.lost, JOB.moves))
    if lost then append(progress, JOB.lost, lost) end
    if moves then append(progress, JOB.moves, moves) end
  end
  if f[AT.prefers] and not moves then append(progress, JOB.prefers, '') end
  if f[AT.saved] or tonumber(f[AT.published]) > 0 then
    local all = redis.call('HGETALL', job_key(id))
    for i = 1, #all, 2 do
      -- s<sample>, k<sample> and k<sample>.<number>; what else there may be is nobody's progress.
      local kind, sample, number = string.match(all[i], '^([sk])(%d+)%.?(%d*)$')
      if kind and whole(sample) and whole(sample) < tonumber(f[AT.samples])
        and (number == '' or (kind == JOB.piece and whole(number))) and string.sub(all[i], -1) ~= '.' then
        local content = kind == JOB.piece and all[i + 1] or ''
        append(progress, all[i], content)
        bytes = bytes + math.max(#content, FIELD_BYTES)
        published = published + (kind == JOB.sample and 1 or 0)
      end
    end
    if published ~= tonumber(f[AT.published]) or published >= tonumber(f[AT.samples]) then error(UNEVEN) end
  end
  return progress
end

local function hand_over(id, f, progress)
  local now, i = clock().now, #given
  bytes = bytes + #f[AT.payload]
  given[i + 1], given[i + 2], given[i + 3] = id, f[AT.attempt] + 0, f[AT.samples]
  given[i + 4], given[i + 5] = math.max(0, now - f[AT.accepted]), f[AT.deadline] and f[AT.deadline] - now or ''
  given[i + 6], given[i + 7] = f[AT.payload], progress
end

local last = redis.call('HMGET', worker_key, 'claim', 'ids', 'alone', 'number')
if last[1] == number then
  for id in string.gmatch(last[2] or '', '%x+') do
    local f = record(id)
    if f[AT.state] == 'r' and f[AT.owner] == worker and not damaged_record(f) then
      alone(id, function() hand_over(id, f, progress_of(id, f)) end)
    end
  end
  return given
end
if (whole(last[1]) or 0) > tonumber(number) then return given end

local committed = whole(redis.call('HGET', KEY.weights, 'committed')) or 0
local ids, jobs, samples, looked, again = {}, 0, 0, 0, 0

-- Scores in `later` that this worker can serve: {from, to} each. able(kind, adapters, version): which other workers can, nil for
-- all. own: for no other worker.
local has, has_names, ranges = {}, '', {{0, math.min(version, ADAPTERS_FROM - 1)}}
local function number_of(adapter) return whole(redis.call('HGET', KEY.weights, 'number:' .. adapter)) end
for i = 11, #ARGV - 1, 2 do
  has[ARGV[i]] = tonumber(ARGV[i + 1])
  local name, number = ARGV[i], number_of(ARGV[i])
  has_names = has_names .. '/' .. name .. '@' .. ARGV[i + 1]
  if number then
    ranges[#ranges + 1] = {ADAPTERS_FROM * number, ADAPTERS_FROM * number + has[name], able = function(_, adapters)
      return string.find(adapters, '/' .. name .. '@', 1, true)
    end}
  end
end
if whole(last[4]) then ranges[#ranges + 1] = {-last[4], -last[4], own = true} end   -- what prefers this worker
ranges[#ranges + 1] = {exact_score(version), exact_score(version), able = function(_, _, its) return its == version end}

local needs = read_needs(ARGV[7] or '', number, version)
append(ranges, unpack(needs.here))

-- Where in `later` a job waits that this worker cannot run; nil for one that it can. An adapter that the pool has no
-- version of keeps nobody waiting: the worker finds that out, and ends the job.
local function score_of(v, g, l, n)
  local exact = exactly(v)
  local for_others = exact and exact ~= version and leave_to_version(exact, l, n, needs)
    or #needs.others > 0 and needs.score(n or PLAIN, exact)
  if for_others then return for_others end
  local needs = exact or math.max(tonumber(v) or 0, g and committed - tonumber(g) or 0)
  if version < needs then return math.min(needs, ADAPTERS_FROM - 1) end
  if not l then return nil end
  local adapter, least = string.match(l, '^(.+)@(%d+)$')
  least = math.max(1, least + 0)               -- raises for what is no adapter's version
  local number = (has[adapter] or 0) < least and number_of(adapter)
  return number and ADAPTERS_FROM * number + math.min(least, ADAPTERS_FROM - 1) or nil
end

local said = redis.call('HMGET', load_key, 'owed1', 'owed2', 'turn0', 'turn1', 'turn2', 'queued', 'offered', 'spread',
                        'attempts')
local load = {queued = counted(said[6]), offered = counted(said[7]), spread = said[8]}

-- What becomes of an id at the front of a queue, or one that was taken from `later`.
local one_job, its_turn = 1, 0     -- of the job that was given last
local unqueued, claimed = 0, {}    -- samples of all that leave their queues; ids that are to be removed together
local function give_or_put_aside(id, queue)
  local f = record(id)
  local state = f[AT.state]
  local gone = state == 'r' or ENDED[state] or not (state or f[AT.payload])   -- it was cancelled or expired while queued;
    or not string.match(id, '^%x+$')                                          -- or nobody submitted that
  local wrong = not gone and (state ~= 'q' and JOB.state or damaged_record(f))
  local fine = not gone and not wrong
  local late = fine and f[AT.deadline] and tonumber(f[AT.deadline]) <= clock().deadlines
  local score = fine and not late and not (f[AT.ending] and not is_task(f[AT.needs]))   -- its end needs no weights
    and score_of(f[AT.min_version], f[AT.max_staleness], f[AT.adapter], f[AT.needs])
  if fine and f[AT.prefers] then redis.call('ZREM', prefers_key, id) end
  -- It is left to the worker that it prefers: one with a lease, if the job was never claimed and its time is not over.
  local ms, other = match(f[AT.prefers] or '', '^(%d+)@(.+)$')
  local until_ms = fine and other and not f[AT.ending] and other ~= worker and tonumber(f[AT.accepted]) + (whole(ms) or 0)
  local away = not fine or late or score or (until_ms and f[AT.attempt] == '0' and until_ms > clock().deadlines
    and leave_to(other, id, f[AT.priority], f[AT.turn], until_ms))
  if away and queue and score ~= NO_SLOT and redis.call('ZREM', queue, id) == 1 then
    unqueued = unqueued + unpublished(f[AT.samples], f[AT.published])
  end
  if wrong then
    dead_letter_damaged(id, string.format(DAMAGED, wrong))
  elseif late then
    fail(id, 'expired', 'its deadline passed in the queue', '', '')
  elseif score == NO_SLOT then
    local last = redis.call('ZREVRANGE', queue_key(f[AT.priority]), 0, 0, 'WITHSCORES')
    redis.call('ZADD', queue_key(f[AT.priority]), (tonumber(last[2]) or 0) + 1, id)
  elseif score then
    redis.call('ZADD', later_key(f[AT.priority]), score, later_member(id, f[AT.turn]))   -- out of the way of those behind it
    if score < 0 and other == worker then redis.call('HDEL', job_key(id), JOB.prefers) end   -- or it would come back at once
    if score >= SLOTS_FROM and not f[AT.needs] then redis.call('HSET', job_key(id), JOB.needs, PLAIN) end
  elseif not away then
    local progress, moved = progress_of(id, f), f[AT.attempt] ~= '0' and redis.call('HDEL', job_key(id), JOB.moving) == 1
    one_job, its_turn, f[AT.attempt] = f[AT.samples] - f[AT.published], whole(f[AT.turn]) or 0, f[AT.attempt] + 1
    if queue then claimed[#claimed + 1], unqueued = id, unqueued + one_job end
    redis.call('HSET', job_key(id), JOB.state, 'r', JOB.owner, worker, JOB.attempt, f[AT.attempt])
    redis.call('SADD', held_key(worker), id)
    jobs, samples = jobs + 1, samples + one_job
    ids[#ids + 1] = id
    if f[AT.attempt] > 1 and not moved then again = again + 1 end
    hand_over(id, f, progress)
  end
end
local function guarded(id, queue)
  looked = looked + 1
  local fine, why = attempt(give_or_put_aside, id, queue)
  if fine then return end
  dead_letter_damaged(id, why)
  load.queued = counted(redis.call('HGET', load_key, 'queued'))   -- that has counted it
end

-- What this claim says of the worker to those that share, see lib_spread.lua.
local its_kind = #needs.others > 0 and token_of(ARGV[7]) or '-'
local me = whole(ARGV[8]) and {
  name = worker, held = whole(ARGV[8]), most = whole(ARGV[8]) + max_samples, pace = ARGV[9], asked = clock().now,
  version = version, like = its_kind .. has_names,
}

-- One worker at a time is the ward for suspects: it lets what it holds run out, then takes them one by one.
local alone_with, runs_alone = last[3], false
if alone_with or (max_samples > 0 and redis.call('LLEN', suspects_key) > 0) then
  local function ward()
    local until_ms, holder = string.match(redis.call('GET', KEY.ward) or '', '^(%d+)@(.*)$')
    return whole(until_ms) and whole(until_ms) > clock().leases and holder or nil
  end
  local function be_ward() redis.call('SET', KEY.ward, clock().leases + WARD_MS .. '@' .. worker, 'EX', WARD_TTL_S) end
  -- The first suspect that this worker could run, and its class. Those that have ended are cleared away.
  local function next_suspect()
    for _, id in ipairs(redis.call('LRANGE', suspects_key, 0, SCAN - 1)) do
      local state, class, min_version, max_staleness, adapter, its_needs, ending = unpack(redis.call('HMGET', job_key(id),
        JOB.state, JOB.priority, JOB.min_version, JOB.max_staleness, JOB.adapter, JOB.needs, JOB.ending))
      if state ~= 'q' then
        redis.call('LREM', suspects_key, 1, id)
      else
        local fine, score = attempt(score_of, min_version, max_staleness, adapter, its_needs)
        if not fine or not whole(class) or whole(class) >= CLASSES then
          redis.call('LREM', suspects_key, 1, id)
          dead_letter_damaged(id, 'its class or its adapter is no such thing')
        elseif ending or not score then
          return id
        end
      end
    end
  end
  if alone_with and redis.call('SISMEMBER', held_key(worker), alone_with) == 1 then
    runs_alone = true
    if ward() == worker then be_ward() end
  elseif max_samples > 0 then
    local id = next_suspect()
    if id and (ward() or worker) == worker then
      be_ward()
      while id and redis.call('SCARD', held_key(worker)) == 0 do
        redis.call('LREM', suspects_key, 1, id)
        guarded(id)
        if jobs > 0 then redis.call('HSET', worker_key, 'alone', id) else id = next_suspect() end
      end
      runs_alone = redis.call('SCARD', held_key(worker)) > 0
    end
  end
end
if runs_alone then max_samples = 0 end   -- it takes nothing else

local function full() return jobs >= max_jobs or samples >= max_samples or bytes >= MAX_BYTES or looked >= max_jobs + SCAN end

-- How many jobs are in the queue of each class, and in its `later`.
local sizes, queued, set_aside = {}, 0, 0
for class = 0, CLASSES - 1 do
  local waits, aside = redis.call('ZCARD', queue_key(class)), redis.call('ZCARD', later_key(class))
  sizes[2 * class + 1], sizes[2 * class + 2], queued, set_aside = waits, aside, queued + waits, set_aside + aside
end

-- What waits although the worker has its share is left by others. If nobody takes the token, those who are silent are taken
-- out. If they are not silent they cannot take it, and the share grows.
local waited = me and whole(ARGV[10]) or 0
if waited > 0 then
  if queued > load.queued then            -- somebody has written into the counter
    load.queued = queued
    redis.call('HSET', load_key, 'queued', queued)
  end
  if redis.call('LLEN', KEY.wake) > 0 then take_out_silent(me, load.queued) end
  load.spread = nil
end

-- Whether the worker has its share of what waits in a range, or in the queues (EVERYWHERE), beside the workers that could
-- take it. It takes a job while it is below its level, and more than one while that brings it nearer to the level.
local EVERYWHERE, limits = {}, {}
local function enough(range)
  if not me or range.own then return false end
  local fresh, over = false, false
  repeat
    fresh = over and range == EVERYWHERE
    if fresh or not limits[range] then
      local level, _
      if range == EVERYWHERE then
        level = level_of_all(me, load, fresh)
      else
        local waits = range.able and 0 or load.queued
        for class = 0, CLASSES - 1 do
          local first = redis.call('ZRANGEBYSCORE', later_key(class), range[1], range[2], 'LIMIT', 0, 1)[1]
          if first then
            local samples, published = unpack(redis.call('HMGET', job_key(id_of(first)), JOB.samples, JOB.published))
            local here = redis.call('ZCOUNT', later_key(class), range[1], range[2])
            waits = waits + here * math.max(1, unpublished(samples, published))
          end
        end
        _, level = takers(me, waits, range.able)
      end
      level = level * 2 ^ math.min(math.max(waited - 2, 0), 16) + math.max(waited - 2, 0)
      limits[range] = level * me.speed
    end
    if jobs > 0 then return me.held + samples + one_job / 2 > limits[range] end
    over = me.held >= limits[range]
  until not over or fresh or range ~= EVERYWHERE
  return over
end

-- The first job of each score in `later` that this worker can serve, GROUPS scores of a range at once. What prefers it comes
-- before all turns. A range may have many scores; each claim begins elsewhere in it, so that no length of context is left out.
local GROUPS = 8
local head_between, next_head, aside   -- what is set aside by this very claim is for others
if set_aside > 0 then
  function head_between(class, range, from, to)
    local first = redis.call('ZRANGEBYSCORE', later_key(class), from, to, 'WITHSCORES', 'LIMIT', 0, 1)
    local turn = range.own and -1 or first[1] and whole(match(first[1], '^(%d+):')) or 0
    return first[1] and {member = first[1], score = first[2], range = range, turn = turn}
  end
  function next_head(class, range)
    local head = head_between(class, range, range.from, range.to)
    if not head and range.start and range.to == range[2] then
      range.from, range.to = range[1], string.format('(%.0f', range.start)
      head = head_between(class, range, range.from, range.to)
    end
    if head then range.from = '(' .. head.score end
    return head
  end
  function aside(class)
    local found = {}
    for _, range in ipairs(ranges) do
      range.from, range.to = range.start or range[1], range[2]
      for _ = 1, GROUPS do
        local head = next_head(class, range)
        if not head then break end
        found[#found + 1] = head
      end
    end
    return found
  end
end

-- Up to `limit` jobs of a class: those that prefer this worker, then by turns those set aside for what it has and those in
-- the queue. Returns how many.
local FRONT = 256              -- ids that it reads at once
local newest = {}
local function take(class, limit)
  local queue, later, before, seen = queue_key(class), later_key(class), jobs, looked
  local heads = aside and aside(class) or {}
  local front, at = {}, 1            -- the first ids of the queue, and the next of them
  local plain = #heads == 0
  if sizes[2 * class + 1] == 0 and plain then return 0 end
  while jobs - before < limit and not full() do
    if #front < at and sizes[2 * class + 1] > 0 then
      if #claimed > 0 then redis.call('ZREM', queue, unpack(claimed)) end
      front, at, claimed = redis.call('ZRANGE', queue, 0, math.min(limit + before - jobs, max_jobs - jobs, FRONT) - 1), 1, {}
    end
    local place, so_far, id = nil, jobs, front[at]
    for i, head in ipairs(heads) do
      if (not place or head.turn < heads[place].turn) and not enough(head.range) then place = i end
    end
    local head, open = heads[place], id and not enough(EVERYWHERE)
    local first = head and open and tonumber(redis.call('ZSCORE', queue, id) or nil)
    if head and not (first and first < head.turn) then
      redis.call('ZREM', later, head.member)
      guarded(id_of(head.member))
      heads[place] = head_between(class, head.range, head.score, head.score) or next_head(class, head.range)
      if not heads[place] then table.remove(heads, place) end
    elseif open then
      at = at + 1
      guarded(id, queue)
    else
      break
    end
    if jobs > so_far then newest[class] = math.max(newest[class] or 0, its_turn) end
  end
  if #claimed > 0 then redis.call('ZREM', queue, unpack(claimed)) end
  claimed, sizes[2 * class + 1] = {}, sizes[2 * class + 1] - jobs + before
  if not plain or looked - seen > jobs - before then
    sizes[2 * class + 1], sizes[2 * class + 2] = redis.call('ZCARD', queue), redis.call('ZCARD', later)
  end
  return jobs - before
end

-- Highest class first, but nobody starves: `owed<class>` counts the jobs of higher classes that went past a waiting one.
local taken, owed = {}, {}
for class = CLASSES - 1, 1, -1 do
  owed[class] = whole(said[class]) or 0
  taken[class] = owed[class] >= SHARE and take(class, math.floor(owed[class] / SHARE)) or 0
end
local passed, waiting, changed = 0, false, {}   -- changed: in `load`
for class = 0, CLASSES - 1 do
  taken[class] = (taken[class] or 0) + take(class, max_jobs)
  -- Those set aside for what this worker has wait, too.
  local left = sizes[2 * class + 2]
  local waits = sizes[2 * class + 1] > 0 or (left > 0 and aside ~= nil and #aside(class) > 0)
  if class > 0 then
    local idle = not waits and left == 0
    local now_owed = idle and 0 or math.max(0, owed[class] + (waits and passed or 0) - SHARE * taken[class])
    if now_owed ~= owed[class] then redis.call('HSET', load_key, 'owed' .. class, now_owed) end
  end
  if newest[class] and newest[class] > counted(said[3 + class]) then append(changed, 'turn' .. class, newest[class]) end
  passed, waiting = passed + taken[class], waiting or waits
end
if unqueued ~= 0 then append(changed, 'queued', math.max(0, load.queued - unqueued)) end
if jobs > 0 then append(changed, 'attempts', counted(said[9]) + jobs) end
if #changed > 0 then redis.call('HSET', load_key, unpack(changed)) end

-- Others get what is left. A worker that has its share comes again when they had the time to.
local shares = me and waiting and max_samples > 0 and not full()
if waiting and (jobs > 0 or looked >= max_jobs + SCAN or shares or max_samples == 0) then
  wake(nil, shares and 2 or 1)
  if #needs.here > 0 then wake(token_of(ARGV[7])) end
end
local limit = limits[EVERYWHERE] or 0
if limit > 0 and limit < me.most then given[2] = math.floor(1000 * limit) end
if shares then
  local below = limits[EVERYWHERE] and me.held + samples < limits[EVERYWHERE]   -- it may get what is left when all are even
  given[1], given[2] = below and SOON_MS or LAPSE_MS, math.max(0, given[2])
elseif me and jobs == 0 and not waiting and max_samples > 0 then
  given[1], given[2] = ask_for_moves(me), -1
end
if again > 0 then redis.call('HINCRBY', load_key, 'redelivered', again) end
redis.call('HSET', worker_key, 'claim', number, 'ids', table.concat(ids, ','))
if me and runs_alone then
  redis.call('HDEL', takers_key, worker)
elseif me then
  redis.call('HSET', takers_key, worker, string.format('%d %d %s %d %d %s %s', me.held + samples, me.most, ARGV[9],
                                                       me.asked, version, its_kind, has_names))
end
return given
