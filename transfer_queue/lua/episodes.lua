-- Leases of episodes, their journals and their ends.

-- script: lease_episodes
-- needs: run, full, clock, server, episode, queue, group, admission
-- ARGV: worker, count, version, nonce, how long its answer is kept for repeats, in ms. Returns rows of leases.
local worker, wanted, version, nonce = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local now = now_ms()

local function take_back(episode)
  local member = member_of(episode)
  local lost_by = member.lost_by .. member.worker .. '\n'
  local losses = count_losses(lost_by)
  call('HSET', member.group, 'l' .. member.m, lost_by)
  if member.split == 'train' then count('expired', 1) end
  if losses >= run.max_lost_leases then
    count('killed_workers', 1)
    local names = string.gsub(string.sub(lost_by, 1, -2), '\n', ', ')
    local reason = losses .. ' workers died or fell silent while they ran it: ' .. names
    give_up(episode, member, cmsgpack.pack({'infra_error', reason, 'worker'}))
    return
  end
  unhold(episode, member.split, member.worker, member.lost_by)
  call('HSET', member.group, 's' .. member.m, 'q')
  open_episode(episode, member.split, member.floor, member.seq)
end

local function take_back_expired()
  for _, episode in ipairs(call('ZRANGEBYSCORE', key('leases'), '-inf', now, 'LIMIT', 0, 256)) do take_back(episode) end
end

-- The same call again, its reply was lost: the same leases, as far as their fences still hold them.
local function given_before()
  local asked = call('GET', key('asked:' .. nonce))
  if not asked then return nil end
  local rows = {}
  for episode, fence in string.gmatch(asked, '([^\n]+) (%d+)\n') do
    if owned(episode, fence, now) then rows[#rows + 1] = describe(episode) end
  end
  return rows
end

local before = given_before()
if before then return before end

take_back_expired()
local rows, given = {}, {}
local held = tonumber(call('HGET', key('workers'), worker) or 0)
local most = math.huge
for _, each in ipairs({8, 1}) do
  if call('HEXISTS', key('most_held'), each .. ' ' .. worker) == 1 then most = each end
end

local function give(episode, group, m)
  local v = call('HMGET', group, 'split', 'l' .. m)
  local fence = new_fence()
  call('HSET', group, 's' .. m, 'l', 'f' .. m, fence, 'w' .. m, worker)
  close_episode(episode, v[1])
  hold(episode, v[1], worker, v[2] or '', now)
  rows[#rows + 1] = describe(episode)
  given[#given + 1] = episode .. ' ' .. fence .. '\n'
end

-- Ties are broken by name: of all workers one is the emptiest.
local function is_emptiest()
  local counts = call('HGETALL', key('workers'))
  for i = 1, #counts, 2 do
    local other, count = counts[i], tonumber(counts[i + 1])
    if count < held or (count == held and other < worker) then return false end
  end
  return true
end

-- Gives what is open, oldest first. An episode that lost leases and needs an emptier worker waits for the emptiest one,
-- which takes nothing until it holds few enough. For other workers it holds up only others that lost leases: they would
-- end more workers at once. Returns whether the worker takes more.
local function give_open(split_key)
  local skipped, one_waits = 0, false
  while #rows < wanted and held < most do
    local open = call('ZRANGEBYSCORE', key(split_key), '-inf', up_to(version), 'LIMIT', skipped, 64)
    if #open == 0 then return true end
    for _, episode in ipairs(open) do
      if #rows >= wanted or held >= most then return false end
      local task_id, m = split_episode(episode)
      local group = group_key(task_id)
      local lost_by = call('HGET', group, 'l' .. m) or ''
      local bound = math.min(most, most_together(lost_by))
      if held >= bound and not one_waits and is_emptiest() then return false end
      one_waits = one_waits or held >= bound
      if one_waits and lost_by ~= '' then
        skipped = skipped + 1
      else
        give(episode, group, m)
        held, most = held + 1, bound
      end
    end
  end
  return false
end

local may_take = give_open('open:other') and give_open('open:train')
while may_take and admit(version, now) do
  may_take = give_open('open:train')
end
-- One answer per call: a worker may have several under way.
if #rows > 0 then call('SET', key('asked:' .. nonce), table.concat(given), 'PX', ARGV[5]) end
return rows

-- script: adopt
-- needs: run, full, clock, server, episode
-- ARGV: episode, fence. Returns the row of the lease that this fence holds, renewed; its journal is the newest.
if not owned(ARGV[1], ARGV[2], now_ms()) then return lease_lost(ARGV[1], ARGV[2]) end
return describe(ARGV[1])

-- script: renew
-- needs: run, full, clock, server, episode
-- ARGV: episode, fence, … Returns the episodes that their fence no longer owns.
local now, lost = now_ms(), {}
for i = 1, #ARGV, 2 do
  if not owned(ARGV[i], ARGV[i + 1], now) then lost[#lost + 1] = ARGV[i] end
end
return lost

-- script: journal
-- needs: run, clock, server, episode
-- ARGV: episode, fence, position, packed entry, bytes it counts for, sampled tokens. Values are position and entry: a hash
-- keeps no order. Returns -1; or how many entries are here, where that is not the position. Fewer: a Redis that lost its
-- newest writes with its machine, and an entry after a hole would answer the call of the lost one.
local episode, fence, position, held = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[5])
local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
local journal = key('journal:' .. episode)
local value, kept = struct.pack('>I4', position) .. ARGV[4], call('HLEN', journal)
if kept ~= position then return call('HGET', journal, position) == value and -1 or kept end
call('HSET', journal, position, value)
call('HINCRBY', member.group, 'n' .. member.m, held)
call('HINCRBY', member.group, 't' .. member.m, ARGV[6])
add_split_bytes(member.split, held)
return -1

-- script: fork
-- needs: run, clock, server, episode
-- ARGV: episode, fence, turn, entries of its journal that the branches share, bytes that these count for, tokens sampled
-- in them, how many. Returns the branches; or how many entries are here, where they are fewer. A repeat finds the
-- branches of the same turn.
local parent, fence, turn, entries, held = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local member = owned(parent, fence, now_ms())
if not member then return lease_lost(parent, fence) end
local group, origin, branches, waiting = member.group, member.m .. ' ' .. turn .. ' ', {}, {}
for m = 0, member.size - 1 do
  local v = call('HMGET', group, 's' .. m, 'c' .. m)
  if v[2] and string.sub(v[2], 1, #origin) == origin then
    branches[#branches + 1] = member.task_id .. '#' .. m
  elseif not v[1] then
    waiting[#waiting + 1] = m
  end
end
if #branches > 0 then return branches end

local journal, shared = key('journal:' .. parent), {}
local known = call('HLEN', journal)
if known < entries then return known end
for position = 0, entries - 1 do
  shared[#shared + 1] = position
  shared[#shared + 1] = call('HGET', journal, position)
end
for i = 1, math.min(tonumber(ARGV[7]), #waiting) do
  local m, branch = waiting[i], member.task_id .. '#' .. waiting[i]
  in_pieces(shared, function(...) call('HSET', key('journal:' .. branch), ...) end)
  call('HSET', group, 's' .. m, 'q', 'c' .. m, origin .. entries .. ' ' .. ARGV[6], 't' .. m, ARGV[6])
  if entries > 0 then call('HSET', group, 'n' .. m, held) end
  add_split_bytes(member.split, held)
  open_episode(branch, member.split, member.floor, member.seq)
  branches[i] = branch
end
if #branches > 0 then call('HINCRBY', group, 'reserved', -#branches) end
return branches

-- script: complete
-- needs: run, full, clock, server, episode, queue, group, lengths
-- ARGV: episode, fence, number of its payload's keys (0 where this server does not hold them), payload bytes, bytes it
-- counts for, reward ('' for none), lowest version ('' for none), highest version, response tokens, those of them that
-- were sampled, nonce, outcome (where there is no reward). KEYS[2…]: its payload's keys, which expire unless it is
-- acknowledged. Returns 1, or 0 where another completion under this fence was acknowledged: its payload counts.
-- Whatever changes of the group is written at once: this is what runs most often beside `journal`.
local episode, fence, pieces, bytes = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local held, reward, lowest = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local highest, tokens, sampled, nonce, outcome = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10], ARGV[11], ARGV[12]
local task_id, m = split_episode(episode)
local group = group_key(task_id)
local state, known_fence, known_nonce = unpack(call('HMGET', group, 's' .. m, 'f' .. m, 'y' .. m))
local split, worker, size, journal_bytes, lost_by, ended, rewarded, group_lowest, rmin, rmax, reserved =
  unpack(call('HMGET', group, 'split', 'w' .. m, 'size', 'n' .. m, 'l' .. m, 'ended', 'rewarded', 'lowest', 'rmin', 'rmax',
    'reserved'))
if known_fence == fence and state == 'd' then return known_nonce == nonce and 1 or 0 end
if known_fence ~= fence or (state ~= 'l' and state ~= 'q') then return lease_lost(episode, fence) end

-- The episode stays with its owner.
local function refuse_it(code, text)
  owned(episode, fence, now_ms())
  return refuse(code, text)
end

if highest > run.version then
  return refuse_it('BADPAYLOAD', 'version_spans: version ' .. highest .. ' is newer than ' .. run.version)
end
local stored = 0
for i = 2, pieces + 1 do stored = stored + call('STRLEN', KEYS[i]) end
if pieces > 0 and stored < bytes then
  return refuse_it('RETRY', episode .. ': ' .. stored .. ' of ' .. bytes .. ' payload bytes are stored')
end

for i = 2, pieces + 1 do call('PERSIST', KEYS[i]) end
if pieces == 0 then call('ZREM', key('reserved'), payload_name(episode, fence, nonce) .. ' ' .. bytes) end

-- A lease that ran out and was not given on is in the queue.
if state == 'l' then unhold(episode, split, worker, lost_by or '') else close_episode(episode, split) end
if journal_bytes then
  call('DEL', key('journal:' .. episode))
  call('HDEL', group, 'n' .. m)
end
add_split_bytes(split, held - tonumber(journal_bytes or 0))

ended = tonumber(ended or 0) + 1
local changed = {
  's' .. m, 'd', 'y' .. m, nonce, 'b' .. m, bytes, 'h' .. m, held, 't' .. m, tokens, 'g' .. m, sampled, 'ended', ended,
}
local function change(field, value)
  changed[#changed + 1] = field
  changed[#changed + 1] = value
end
if lowest then change('v' .. m, lowest) end
if reward ~= '' then
  change('r' .. m, 1)
  change('rewarded', tonumber(rewarded or 0) + 1)
  if lowest and (not group_lowest or lowest < tonumber(group_lowest)) then change('lowest', lowest) end
  if not rmin or tonumber(reward) < tonumber(rmin) then change('rmin', reward) end
  if not rmax or tonumber(reward) > tonumber(rmax) then change('rmax', reward) end
else
  change('o' .. m, outcome)
end
call('HSET', group, unpack(changed))
if split == 'train' then
  count('completed', 1)
  count_length(tokens, false)
end
count_split(split, 'done', 1)
count_ended(group, task_id, tonumber(size), ended, tonumber(reserved or 0))
return 1

-- script: fail
-- needs: run, full, clock, server, episode, queue, group
-- ARGV: episode, fence, outcome, its failure, how many failures are counted, the name of all others. Returns 1 if the
-- episode will be tried again, 0 if it is given up.
local episode, fence = ARGV[1], ARGV[2]
local task_id, m = split_episode(episode)
local before = call('HMGET', group_key(task_id), 'k' .. m, 's' .. m)
if before[1] == fence then return before[2] == 'x' and 0 or 1 end

local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
member.attempts = call('HINCRBY', member.group, 'a' .. m, 1)
call('HSET', member.group, 'k' .. m, fence)
if member.split == 'train' then
  local counted = call('HEXISTS', key('failures'), ARGV[4]) == 1 or call('HLEN', key('failures')) < tonumber(ARGV[5])
  call('HINCRBY', key('failures'), counted and ARGV[4] or ARGV[6], 1)
end
if member.attempts < run.max_attempts then
  hand_back(episode, member)
  if member.split == 'train' then count('retried', 1) end
  return 1
end
give_up(episode, member, ARGV[3])
return 0

-- script: prove_reward
-- needs: run, full
-- ARGV: name of a reward that came.
call('SADD', key('proven'), ARGV[1])

-- script: release
-- needs: run, full, clock, server, episode
-- ARGV: episode, fence. Returns a lease to the queue; a lost lease is ignored.
local member = owned(ARGV[1], ARGV[2], now_ms())
if member then hand_back(ARGV[1], member) end
