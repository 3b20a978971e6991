-- Leases of episodes, their journals and their ends.

-- script: lease_episodes
-- needs: run, full, server, episode, queue, admission
-- ARGV: worker, count, version, nonce. Returns rows of leases.
local worker, wanted, version, nonce = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local now = now_ms()

local function take_back_expired()
  for _, episode in ipairs(call('ZRANGEBYSCORE', key('leases'), '-inf', now, 'LIMIT', 0, 256)) do
    local task_id, m = split_episode(episode)
    local group = group_key(task_id)
    local v = call('HMGET', group, 'split', 'w' .. m, 'floor', 'seq')
    unhold(episode, v[1], v[2])
    call('HSET', group, 's' .. m, 'q')
    open_episode(episode, v[1], tonumber(v[3]), tonumber(v[4]))
    if v[1] == 'train' then count('expired', 1) end
  end
end

local function give(episode)
  local task_id, m = split_episode(episode)
  local group = group_key(task_id)
  local v = call('HMGET', group, 'split', 'f' .. m, 'z' .. m)
  local fence = new_fence()
  call('HSET', group, 's' .. m, 'l', 'f' .. m, fence, 'w' .. m, worker)
  if v[2] then call('HSET', group, 'z' .. m, (v[3] or '') .. v[2] .. ' ') end
  close_episode(episode, v[1])
  hold(episode, v[1], worker, now)
end

-- The same call again, its reply was lost: the same leases, as far as they are still this worker's.
local function given_before()
  local asked = call('HGET', key('asked'), worker)
  if not asked or string.sub(asked, 1, #nonce) ~= nonce then return nil end
  local rows = {}
  for episode, fence in string.gmatch(asked, '\n([^\n]+) (%d+)') do
    if owned(episode, fence, now) then rows[#rows + 1] = describe(episode) end
  end
  return rows
end

local before = given_before()
if before then return before end

take_back_expired()
local rows, given = {}, {nonce}
local function give_open(split_key)
  local room = wanted - #rows
  if room <= 0 then return end
  for _, episode in ipairs(call('ZRANGEBYSCORE', key(split_key), '-inf', up_to(version), 'LIMIT', 0, room)) do
    give(episode)
    rows[#rows + 1] = describe(episode)
    given[#given + 1] = episode .. ' ' .. rows[#rows][4]
  end
end

give_open('open:other')
give_open('open:train')
while #rows < wanted and admit(version, now) do
  give_open('open:train')
end
if #rows > 0 then call('HSET', key('asked'), worker, table.concat(given, '\n')) end
return rows

-- script: adopt
-- needs: run, full, server, episode
-- ARGV: episode, fence. Returns the row of the lease that this fence holds, renewed; its journal is the newest.
if not owned(ARGV[1], ARGV[2], now_ms()) then return lease_lost(ARGV[1], ARGV[2]) end
return describe(ARGV[1])

-- script: renew
-- needs: run, full, server, episode
-- ARGV: episode, fence, … Returns the episodes that their fence no longer owns.
local now, lost = now_ms(), {}
for i = 1, #ARGV, 2 do
  if not owned(ARGV[i], ARGV[i + 1], now) then lost[#lost + 1] = ARGV[i] end
end
return lost

-- script: journal
-- needs: run, server, episode
-- ARGV: episode, fence, nonce, packed entry, bytes it counts for, sampled tokens. Values are position and entry: a hash
-- keeps no order.
local episode, fence, nonce, entry, held = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
local journal = key('journal:' .. episode)
if call('HEXISTS', journal, nonce) == 0 then
  call('HSET', journal, nonce, struct.pack('>I4', call('HLEN', journal)) .. entry)
  call('HINCRBY', member.group, 'n' .. member.m, held)
  call('HINCRBY', member.group, 't' .. member.m, ARGV[6])
  add_split_bytes(member.split, held)
end
return 1

-- script: complete
-- needs: run, full, server, episode, queue, group, lengths
-- ARGV: episode, fence, payload bytes, bytes it counts for, reward ('' for none), lowest version ('' for none), highest
-- version, response tokens, outcome. KEYS[2…]: the payload's keys, where this server holds them.
local episode, fence, bytes, held, reward = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local lowest, highest, tokens = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local task_id, m = split_episode(episode)
local before = call('HMGET', group_key(task_id), 's' .. m, 'f' .. m)
if before[1] == 'd' and before[2] == fence then return 0 end

local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
if highest > run.version then
  return refuse('BADPAYLOAD', 'version_spans: version ' .. highest .. ' is newer than ' .. run.version)
end
local stored = 0
for i = 2, #KEYS do stored = stored + call('STRLEN', KEYS[i]) end
if #KEYS > 1 and stored < bytes then
  return refuse('RETRY', episode .. ': ' .. stored .. ' of ' .. bytes .. ' payload bytes are stored')
end
unhold(episode, member.split, member.worker)
call('DEL', key('journal:' .. episode))
call('HDEL', member.group, 'n' .. m)
add_split_bytes(member.split, held - member.journal_bytes)
call('HSET', member.group, 's' .. m, 'd', 'b' .. m, bytes, 'h' .. m, held, 't' .. m, tokens)
if lowest then call('HSET', member.group, 'v' .. m, lowest) end
if reward ~= '' then
  call('HSET', member.group, 'r' .. m, 1)
  call('HINCRBY', member.group, 'rewarded', 1)
  local known = call('HMGET', member.group, 'lowest', 'rmin', 'rmax')
  if lowest and (not known[1] or lowest < tonumber(known[1])) then call('HSET', member.group, 'lowest', lowest) end
  if not known[2] or tonumber(reward) < tonumber(known[2]) then call('HSET', member.group, 'rmin', reward) end
  if not known[3] or tonumber(reward) > tonumber(known[3]) then call('HSET', member.group, 'rmax', reward) end
else
  call('HSET', member.group, 'o' .. m, ARGV[9])
end
if member.split == 'train' then
  count('completed', 1)
  count_length(tokens, false)
end
count_split(member.split, 'done', 1)
member_ended(member)
return 1

-- script: fail
-- needs: run, full, server, episode, queue, group
-- ARGV: episode, fence, outcome. Returns 1 if the episode will be tried again, 0 if it is given up.
local episode, fence = ARGV[1], ARGV[2]
local task_id, m = split_episode(episode)
local before = call('HMGET', group_key(task_id), 'k' .. m, 's' .. m)
if before[1] == fence then return before[2] == 'x' and 0 or 1 end

local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
local attempts = call('HINCRBY', member.group, 'a' .. m, 1)
call('HSET', member.group, 'k' .. m, fence)
if attempts < run.max_attempts then
  hand_back(episode, member)
  if member.split == 'train' then count('retried', 1) end
  return 1
end
unhold(episode, member.split, member.worker)
if member.journal_bytes > 0 then
  -- The journal moves to the dead letter: it no longer counts for back-pressure, but still for memory.
  call('RENAME', key('journal:' .. episode), key('letter_journal:' .. episode))
  call('HSET', key('letter:' .. episode), 'bytes', member.journal_bytes)
  call('HDEL', member.group, 'n' .. m)
  if member.split == 'train' then add_bytes(0, -member.journal_bytes) end
end
put_letter(episode, ARGV[3], attempts)
call('HSET', member.group, 's' .. m, 'x')
if member.split == 'train' then count('failed', 1) end
count_split(member.split, 'done', 1)
member_ended(member)
return 0

-- script: release
-- needs: run, full, server, episode
-- ARGV: episode, fence. Returns a lease to the queue; a lost lease is ignored.
local member = owned(ARGV[1], ARGV[2], now_ms())
if member then hand_back(ARGV[1], member) end
return 1
