-- This is put before every script, behind lib_pieces.lua: how waiting work is shared between the workers that could take it.
--
-- HASH `takers` has each worker that takes part: '<samples it holds> <most it can hold> <pace> <asked> <version> <kind> <adapters>'.
-- Its own claim says so, with the samples that it is given, and each change of what it holds is followed by a claim. asked:
-- the pool's clock then. pace: '<tokens a second, 0 for unknown>/<kind of engine, in hex>'. kind: the token of what it can do,
-- '-' in a pool whose workers are all alike. adapters: each with its version, as '/<name>@<version>'. Whoever leaves its share
-- to others for SILENT_MS is taken out until its next claim: it is paused, frozen, or runs a suspect.
--
-- The level is what an average worker holds when everything that waits is shared: water that is poured over what they hold.
-- A claim fills a worker up to the level times its speed: the mean pace of its kind of engine beside that of all. What one
-- engine measures depends on what it happens to run. To read all workers takes a moment, so `spread` in `load` keeps the level
-- for some milliseconds: '<at> <level> <speeds of all> <samples offered by then>', and ' <kind of engine>=<speed>' if not 1.
local LAPSE_MS = 250           -- after which a worker that has its share looks again at what is left
local SILENT_MS = 500          -- twice as much: who has its share, too, is about to ask
local SOON_MS = 10
local SAME_PACE = 1.25         -- up to this factor a kind of engine counts as fast as the mean
local ROUNDS = 8               -- of the search for the level; each leaves out who is above it or full
local TAKER = '^(%d+) (%d+) (%S+) (%d+) (%d+) (%S+) (.*)$'

-- The workers that share: {name, held, most, pace, asked, version, like, speed} each; their level when so many samples wait;
-- their speeds together; and the speed of each kind of engine. me: the caller, as it is now. able(kind, adapters, version): whether
-- such workers count, nil for all.
local function takers(me, waiting, able)
  local found, kinds, paces, known = {me}, {}, 0, 0
  local all = redis.call('HGETALL', takers_key)
  for i = 1, #all, 2 do
    local held, most, pace, asked, version, kind, adapters = match(all[i + 1], TAKER)
    held, most, asked = whole(held), whole(most), whole(asked)
    if held and most and asked and all[i] ~= me.name and (not able or able(kind, adapters, whole(version))) then
      found[#found + 1] = {name = all[i], held = held, most = most, pace = pace, asked = asked,
                           version = whole(version) or 0, like = kind .. adapters}
    end
  end
  for _, one in ipairs(found) do
    local pace, engine = match(one.pace, '^([%d.e+-]+)/(%x*)$')
    pace, one.engine = tonumber(pace or nil) or 0, engine or ''
    if pace > 0 and pace < 1e9 then
      local kind = kinds[one.engine] or {0, 0}
      kinds[one.engine], paces, known = {kind[1] + pace, kind[2] + 1}, paces + pace, known + 1
    end
  end
  for engine, kind in pairs(kinds) do
    local speed = kind[1] / kind[2] / (paces / known)
    kinds[engine] = speed < SAME_PACE and speed > 1 / SAME_PACE and 1 or math.max(1 / 16, math.min(16, speed))
  end
  local sum, speeds = waiting, 0
  for _, one in ipairs(found) do
    one.speed = kinds[one.engine] or 1
    sum, speeds = sum + one.held, speeds + one.speed
  end
  local level = sum / speeds
  for _ = 1, ROUNDS do
    local rest, below = waiting, 0
    for _, one in ipairs(found) do
      local share = level * one.speed
      if one.most <= share then
        rest = rest - math.max(0, one.most - one.held)
      elseif one.held < share then
        rest, below = rest + one.held, below + one.speed
      end
    end
    if below == 0 then break end
    local last = level
    level = math.max(0, rest / below)
    if math.abs(level - last) < 0.01 then break end
  end
  return found, level, speeds, kinds
end

-- The level of all workers, for `me`, whose speed it finds out. load: its queued, offered and spread. fresh: read all of them
-- now, unless that was just done.
local FRESH_MS = 5
local PLENTY_MS = 100
local function level_of_all(me, load, fresh)
  local now, offered = clock().now, load.offered
  local at, level, speeds, before, kinds = match(load.spread or '', '^(%d+) (%S+) (%S+) (%d+)(.*)$')
  at, level, speeds = whole(at), tonumber(level or nil), tonumber(speeds or nil)
  if at and level and speeds and speeds > 0 then
    level = level + (offered - counted(before)) / speeds
    me.speed = kinds ~= '' and tonumber(match(kinds, ' ' .. (match(me.pace, '/(%x*)$') or '') .. '=(%S+)') or nil) or 1
    local plenty = level * me.speed >= me.most   -- then a little more or less makes no difference
    local age, oldest = now - at, fresh and FRESH_MS or plenty and PLENTY_MS or math.max(FRESH_MS, speeds / 4)
    if age >= 0 and age <= oldest then return level end
  end
  local _
  _, level, speeds, kinds = takers(me, load.queued)
  local told = {string.format('%d %.3f %.3f %d', now, level, speeds, offered)}
  for engine, speed in pairs(kinds) do
    if speed ~= 1 then append(told, string.format('%s=%.3f', engine, speed)) end
  end
  load.spread = table.concat(told, ' ')
  redis.call('HSET', load_key, 'spread', load.spread)
  return level
end

-- Take those out who have left their share to others: they hold less, and have not asked since.
local function take_out_silent(me, waiting)
  local workers, level = takers(me, waiting)
  local now = clock().now
  for _, one in ipairs(workers) do
    if one ~= me and one.held < math.min(one.most, level * one.speed) and one.asked + SILENT_MS <= now then
      redis.call('HDEL', takers_key, one.name)
    end
  end
end

-- A worker that has found nothing asks for work that others have, for all that have less than their share. Nobody asks again
-- for a while, and for longer if nothing was moved. `planned` in `load` has until when, that time, the moves by then, the
-- level, and the claimed jobs by then. Returns the ms after which to look again, 0 if loads are even.
local MOVES = 32              -- that one ring tells at most
local ASKED_MS = 2000
local PAUSE_MS = 200
local LONGEST_PAUSE_MS = 2000
local LITTLE = 3 / 4          -- who has less than this part of its share is given some
local function ask_for_moves(me)
  local now = clock().now
  local planned, all_moves, attempts = unpack(redis.call('HMGET', load_key, 'planned', 'moved', 'attempts'))
  local at, pause, moved, level, before = match(planned or '', '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
  at, pause, moved, level = whole(at) or 0, whole(pause) or 0, whole(moved) or 0, whole(level) or 0
  if now < at and at <= now + LONGEST_PAUSE_MS then
    local lacks = me.held < level * LITTLE or (level == 0 and whole(before) ~= counted(attempts))
    return (pause > 0 or lacks) and at - now or 0
  end

  -- Who should give how many samples to whom, when nothing waits: '<giver> <taker> <its version> <samples> …', '' if loads are
  -- even. `me` goes first; others get some if they have asked lately. A taker has the adapters and the features of the giver, and
  -- no older version, under which samples would have to begin again. The giver decides what is worth its cost.
  local function moves_between()
    local workers, _, speeds = takers(me, 0)
    local needy, givers, moves, level = {}, {}, {}, 0
    for _, one in ipairs(workers) do level = level + one.held / speeds end
    for _, one in ipairs(workers) do
      local share = level * one.speed
      one.over, one.under = one.held - share, math.min(share, one.most) - one.held
      if one.over >= 1 then
        givers[#givers + 1] = one
      elseif one.under >= 1 and one.held < share * LITTLE and (one == me or one.asked + ASKED_MS > now) then
        needy[#needy + 1] = one
      end
    end
    table.sort(givers, function(a, b) return a.over > b.over end)
    table.sort(needy, function(a, b) return a == me and b ~= me or (b ~= me and a.under > b.under) end)
    for _, taker in ipairs(needy) do
      for _, giver in ipairs(givers) do
        local some = math.floor(math.min(giver.over, taker.under))
        if some >= 1 and #moves < 4 * MOVES and taker.like == giver.like and taker.version >= giver.version then
          giver.over, taker.under = giver.over - some, taker.under - some
          append(moves, giver.name, taker.name, taker.version, some)
        end
      end
    end
    return table.concat(moves, ' '), level
  end

  local plan
  plan, level = moves_between()
  if plan == '' then
    pause = 0
  else
    ring('kind', 'move', 'moves', plan, 'level', math.ceil(level))
    local useless = pause > 0 and moved == counted(all_moves)
    pause = useless and math.min(2 * pause, LONGEST_PAUSE_MS) or PAUSE_MS
  end
  redis.call('HSET', load_key, 'planned', string.format('%d %d %d %d %d', now + math.max(pause, PAUSE_MS), pause,
                                                        counted(all_moves), level, counted(attempts)))
  return pause
end
