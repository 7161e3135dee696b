-- This is put before every script, behind lib.lua: what a job's record has of its samples, published and unfinished.
local PIECES_SHARE = 4         -- saved pieces have this part of the pool's bytes,
local PIECES_LEAST = 1048576   -- or so many bytes at least; what does not fit is not saved
local ASKED = 256              -- fields of a record that one command is about
local SAMPLES = 4096           -- no job has more

-- The field of a job's record that holds piece `number` of a sample.
local function piece_field(sample, number)
  return tonumber(number) == 0 and JOB.piece .. sample or JOB.piece .. sample .. '.' .. number
end

local UNEVEN = 'd must be the number of its published samples'
-- Raises unless so many of a job's `n` samples are published as its record says: nobody could tell when it has ended.
local function must_agree(key, said, n)
  local found = 0
  if tonumber(n) > SAMPLES then error(UNEVEN) end
  for first = 0, n - 1, ASKED do
    local fields = {}
    for sample = first, math.min(first + ASKED, n) - 1 do fields[#fields + 1] = JOB.sample .. sample end
    for _, published in ipairs(redis.call('HMGET', key, unpack(fields))) do
      if published then found = found + 1 end
    end
  end
  if found ~= tonumber(said) then error(UNEVEN) end
end

-- Count `bytes` of saved pieces, negative when they are dropped.
local function count_saved(key, bytes)
  redis.call('HINCRBY', key, JOB.saved, bytes)
  redis.call('HINCRBY', load_key, 'saved', bytes)
end

-- Delete the pieces of a sample from number `piece` on. Returns how many there were.
local function drop_pieces_from(key, sample, piece)
  local bytes, dropped, there = 0, 0, true
  while there do
    local fields = {}
    while there and #fields < ASKED do
      local field = piece_field(sample, piece + dropped)
      local size = redis.call('HSTRLEN', key, field)
      there = size > 0
      if there then fields[#fields + 1], bytes, dropped = field, bytes + size, dropped + 1 end
    end
    if #fields > 0 then redis.call('HDEL', key, unpack(fields)) end
  end
  if bytes > 0 then count_saved(key, -bytes) end
  return dropped
end

-- Save the next piece of an unfinished sample; it takes the place of itself and all later ones, so piece 0 starts the
-- sample over. Within an attempt a worker starts over only to save the same tokens again, so a delayed copy of a piece
-- either fits or does not begin where the one before it ends, which the next worker looks at. Returns ok; gap if its
-- forerunner is missing (a delayed copy of an earlier piece took it away): it is not kept, whoever sent it starts over;
-- or full: it is not kept, and may be sent again.
local function save_partial(key, sample, piece, bytes)
  if redis.call('HEXISTS', key, JOB.sample .. sample) == 1 then return 'ok' end
  local number = tonumber(piece)
  if number > 0 and redis.call('HEXISTS', key, piece_field(sample, number - 1)) == 0 then return 'gap' end
  local more = #bytes - redis.call('HSTRLEN', key, piece_field(sample, number))
  local load = redis.call('HMGET', load_key, 'cap', 'saved')
  local most = math.max(math.floor(counted(load[1]) / PIECES_SHARE), PIECES_LEAST)
  if more > 0 and counted(load[2]) + more > most then return 'full' end
  -- Written before anything is deleted: a Redis at its memory limit refuses a script only at its first write.
  redis.call('HSET', key, piece_field(sample, number), bytes)
  count_saved(key, more)
  drop_pieces_from(key, sample, number + 1)
  return 'ok'
end
