-- This is put before every script, behind lib_spread.lua: workers of one pool may differ in what their engines can do.
--
-- HASH `needs`, in a pool where they do:
--   can:<what a worker can>   until when, by the pool's clock, the last lease of such workers goes
--   slot:<names>              the number under which jobs wait in `later` that need these names, and more context than 0
-- A job waits for workers that are there, or were within REMEMBER_MS. One that nobody could run goes to anybody, who
-- refuses it by name.
local REMEMBER_MS, SLOTS = 3600000, 256
local KINDS = 512              -- while there are more kinds of workers, each is forgotten with its last lease
local PLAIN = '0 generate'     -- what a job needs that does not say
local NO_SLOT = math.huge      -- there are too many slots: such a job waits at the end of its queue
-- What a job for exactly one version needs, when a worker of that version cannot do the rest: it waits in a slot of its own.
local function with_version(names, exact) return exact and names .. ' version=' .. exact or names end
local function token_of(can) return 'can-' .. string.sub(server.sha1hex(can), 1, 16) end

-- What `needs` says to a worker that can do what `text` says. others: kinds of workers, this one's among them; here: the slots
-- that it can serve, as ranges of a claim, each of which begins elsewhere in it; score(n): see below. In a pool whose workers
-- are all alike there is nothing of all this: functions are made only where they are needed, because each claim makes them anew.
local ALL_ALIKE = {others = {}, here = {}}
local function read_needs(text, claim, version)
  local known = text ~= '' and redis.call('HGETALL', needs_key) or {}
  if text == '' or (#known == 2 and known[1] == 'can:' .. text) then return ALL_ALIKE end
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
  local needs, can, able = {others = {}, here = {}}, parsed(text), nil
  can.has['version=' .. version] = true
  local slots, slots_used, swept = {}, 0, false
  local since = clock().leases - (#known > 2 * (SLOTS + KINDS) and 0 or REMEMBER_MS)
  for i = 1, #known, 2 do
    local kind, names = string.match(known[i], '^(%a+):(.+)$')
    local value = whole(known[i + 1])
    if kind == 'can' and value and value > since then
      needs.others[#needs.others + 1] = {text = names, alive = value > clock().leases, does = {}}
    elseif kind == 'can' then
      redis.call('HDEL', needs_key, known[i])
    elseif kind == 'slot' and value then
      slots[names], slots_used = value, slots_used + 1
      if can_all(names, can.has) then
        local from = SLOTS_FROM + value * SLOT
        local start = from + claim * 40503 % (can.context + 1)   -- spread by the golden ratio
        append(needs.here, {from, from + can.context, start = start, able = function(kind) return able(names, kind) end})
      end
    end
  end

  -- Whether workers of this kind can do what is needed. Most claims ask for no other worker, and few for many needs.
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
  local function slot_of(names)
    if slots[names] then return slots[names] end
    local crowded = slots_used >= SLOTS and not swept
    swept = swept or crowded
    for used, value in pairs(crowded and slots or {}) do
      local waits = 0
      for class = 0, CLASSES - 1 do
        waits = waits + redis.call('ZCOUNT', later_key(class), SLOTS_FROM + value * SLOT, SLOTS_FROM + (value + 1) * SLOT - 1)
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
  -- if there is no place.
  local scores = {}
  function needs.score(n, exact)
    local key = with_version(n, exact)
    if scores[key] == nil then
      local need, waits = parsed(n), false
      if need.context > can.context or not can_all(need.names, can.has) then
        for _, other in ipairs(needs.others) do
          if can_do(other, need) then
            waits = true
            if other.alive and not other.woken then wake(token_of(other.text)) end
            other.woken = true
          end
        end
      end
      local slot = waits and slot_of(with_version(need.names, exact))
      scores[key] = waits and (slot and SLOTS_FROM + slot * SLOT + need.context or NO_SLOT)
    end
    return scores[key]
  end

  -- Whether workers of the kind with this token have these names.
  local kinds = {}
  function able(names, kind)
    if not kinds[names] then
      kinds[names] = {['-'] = true, [token_of(text)] = true}
      for _, other in ipairs(needs.others) do
        if can_do(other, {context = 0, names = names}) then kinds[names][token_of(other.text)] = true end
      end
    end
    return kinds[names][kind]
  end
  -- The same of what a job needs.
  function needs.able(n, kind) return able(parsed(n).names, kind) end
  return needs
end

-- A task, which computes what is left of it, though it is to end with what it has.
local function is_task(n) return n and string.find(n, 'task:', 1, true) end

-- A job for exactly one version is left to the workers that share and have that, its adapter and what it needs: they are
-- woken. Returns where it waits.
local all_takers, told = nil, {}
local function leave_to_version(exact, adapter, n, needs)
  local name = adapter and '/' .. string.gsub(adapter, '@%d+$', '') .. '@'
  local what = exact .. (name or '') .. ' ' .. (n or '')
  all_takers = all_takers or redis.call('HGETALL', takers_key)
  for i = 1, told[what] and 0 or #all_takers, 2 do
    local _, _, _, _, its, kind, adapters = match(all_takers[i + 1], TAKER)
    if whole(its) == exact and (not name or string.find(adapters, name, 1, true))
      and (#needs.others == 0 or needs.able(n or PLAIN, kind)) then
      wake(all_takers[i])
    end
  end
  told[what] = true
  return exact_score(exact)
end
