-- Turns on devices that engines and trainer share; the rule is `TurnTable` in turns.py.

-- part: turns
-- needs: base
-- Entries by holder, those that are over removed: they are taken from the hash by the next one that may write it.
local turn_entries, expired

local function read_turns(now)
  local flat = call('HGETALL', key('turns'))
  turn_entries, expired = {}, {}
  for i = 1, #flat, 2 do
    local entry = cmsgpack.unpack(flat[i + 1])
    if entry.till > now then turn_entries[flat[i]] = entry else expired[#expired + 1] = flat[i] end
  end
end

local function pack_turns(caller, over)
  local names, rows = {}, {}
  for name in pairs(turn_entries) do names[#names + 1] = name end
  table.sort(names)
  local mine, wanted = turn_entries[caller], 0
  for i, name in ipairs(names) do
    local one = turn_entries[name]
    rows[i] = {one.side, name, one.holds, one.waits, one.bytes, one.used, one.fence}
    if one.waits == 1 and not (mine and one.side == mine.side) then wanted = 1 end
  end
  return cmsgpack.pack({fence = mine and mine.fence or 0, wanted = wanted, over = over, rows = rows})
end

-- script: take_turn
-- needs: run, full, clock, turns
-- ARGV: side, holder, number of the call, 1 where it wants to hold, time to live in ms, bytes claimed (-1: all that are
-- free), bytes used, budget (0: none), reports that are kept. Returns a packed map of all entries.
local side, holder, number, wants = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local claim, used, budget, now = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), now_ms()
read_turns(now)
for _, name in ipairs(expired) do call('HDEL', key('turns'), name) end
local before = turn_entries[holder] or {side = side, number = -1, holds = 0, waits = 0, bytes = 0, used = 0, fence = 0}
if number <= before.number then return pack_turns(holder, 0) end
local after = {side = side, number = number, till = now + tonumber(ARGV[5]), holds = before.holds, waits = 0,
  bytes = before.bytes, used = used, fence = before.fence}
local over = 0

local function decide()
  local taken, alone, behind = 0, false, false
  for name, one in pairs(turn_entries) do
    if name ~= holder then
      taken = taken + one.bytes
      alone = alone or (one.holds == 1 and (side == 'trainer' or one.side == 'trainer'))
      behind = behind or (side == 'engine' and one.waits == 1 and one.side == 'trainer')
    end
  end
  if claim < 0 then claim = math.max(0, budget - taken) end
  local too_much = budget > 0 and taken + claim > budget
  if before.holds == 1 then
    if too_much then over = 1 else after.bytes = claim end
  elseif alone or behind or too_much then
    after.waits = 1
    if too_much and not alone then over = 1 end
  else
    after.holds, after.bytes, after.fence = 1, claim, call('INCR', key('turn_fence'))
  end
end

if wants then decide() else after.holds, after.bytes, after.fence = 0, math.max(0, claim), 0 end
turn_entries[holder] = after
call('HSET', key('turns'), holder, cmsgpack.pack(after))

local function changed()
  for _, name in ipairs({'holds', 'bytes', 'used', 'fence'}) do
    if before[name] ~= after[name] then return true end
  end
  return false
end

if changed() then
  local bytes, in_use = 0, 0
  for _, one in pairs(turn_entries) do bytes, in_use = bytes + one.bytes, in_use + one.used end
  call('RPUSH', key('turn_reports'), cmsgpack.pack({at = now, side = side, holder = holder, holds = after.holds,
    bytes = after.bytes, used = used, total_bytes = bytes, total_used = in_use}))
  call('LTRIM', key('turn_reports'), -tonumber(ARGV[9]), -1)
end
return pack_turns(holder, over)

-- script: turns
-- needs: run, turns
-- flags: no-writes
-- Returns a packed map of all entries.
read_turns(now_ms())
return pack_turns('', 0)
