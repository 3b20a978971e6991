-- Episodes. A group is one hash, group:TASK_ID, small enough for Redis's compact encoding; its task is task:TASK_ID.
-- Of the group: seq, split, source, priority, size, min_version, cost, members_cost, state, at (ms, of the last change of
-- state), floor, due, ended, rewarded, lowest, rmin, rmax (rewards), step. Of member m: sM state (q, l, d, x), fM fence,
-- wM worker, aM attempts, kM fence of the last counted failure, nM journal bytes, tM response tokens, bM payload bytes,
-- hM what they count for, rM 1 if it carries a reward, vM its lowest version, pM 1 if spilled, oM outcome without
-- reward, zM earlier fences.
local function split_episode(episode)
  return string.match(episode, '^(.*)#(%d+)$')
end

local function group_key(task_id)
  return key('group:' .. task_id)
end

local function payload_name(episode, fence)
  return episode .. '@' .. fence
end

-- `held` counts for the run's memory; `waiting` for back-pressure too, until its step is trained.
local function add_bytes(held, waiting)
  if held ~= 0 then call('HINCRBY', key('counters'), 'bytes', held) end
  if waiting ~= 0 then call('HINCRBY', key('counters'), 'unconsumed', waiting) end
end

local function add_split_bytes(split, by)
  add_bytes(by, split == 'train' and by or 0)
end

local function count_split(split, field, by)
  if split ~= 'train' then
    call('HINCRBY', key('splits'), split .. ' ' .. field, by)
  end
end

-- Put an episode where workers find it: lowest floor first, then oldest group.
local function open_episode(episode, split, floor, seq)
  call('ZADD', key(split == 'train' and 'open:train' or 'open:other'), score(floor, seq), episode)
  count_split(split, 'queued', 1)
end

local function close_episode(episode, split)
  call('ZREM', key(split == 'train' and 'open:train' or 'open:other'), episode)
  count_split(split, 'queued', -1)
end

local function hold(episode, split, worker, now)
  call('ZADD', key('leases'), now + run.lease_ttl_ms, episode)
  call('HINCRBY', key('workers'), worker, 1)
  count_split(split, 'leased', 1)
  if split == 'train' then count('leased', 1) end
end

local function unhold(episode, split, worker)
  call('ZREM', key('leases'), episode)
  if call('HINCRBY', key('workers'), worker, -1) <= 0 then
    call('HDEL', key('workers'), worker)
  end
  count_split(split, 'leased', -1)
  if split == 'train' then count('leased', -1) end
end

-- The member that `fence` still owns, or nil. A lease that ran out and was not given on is taken up again: after a
-- pause of Redis itself every worker goes on.
local function owned(episode, fence, now)
  local task_id, m = split_episode(episode)
  if not task_id then return nil end
  local group = group_key(task_id)
  local v = call('HMGET', group, 'f' .. m, 's' .. m, 'split', 'w' .. m, 'floor', 'seq', 'size', 'n' .. m, 'a' .. m)
  if v[1] ~= fence or (v[2] ~= 'l' and v[2] ~= 'q') then return nil end
  local member = {
    task_id = task_id, m = m, group = group, split = v[3], worker = v[4], floor = tonumber(v[5]), seq = tonumber(v[6]),
    size = tonumber(v[7]), journal_bytes = tonumber(v[8] or 0), attempts = tonumber(v[9] or 0),
  }
  if v[2] == 'q' then
    close_episode(episode, member.split)
    call('HSET', group, 's' .. m, 'l')
    hold(episode, member.split, member.worker, now)
  else
    call('ZADD', key('leases'), now + run.lease_ttl_ms, episode)
  end
  return member
end

-- A Redis that was started again, or a replica in its place, may have forgotten its newest fences with its machine,
-- whose owners live on. It goes on at a number that no start before it can have reached: ten for each millisecond of its
-- clock. Nothing may be added to the known ones: two starts that forgot the same would come to the same sum. Only where
-- the clock went back that must do, by a step of this start's own. (Numbers of 14 digits are the same in Lua's text.)
local FENCES_PER_MS, LONGEST_STEP, this_server = 10, 1000000, nil
local function new_fence()
  local counters = key('counters')
  this_server = this_server or server_start()
  local v = call('HMGET', counters, 'server', 'fence')
  if tonumber(v[1]) ~= this_server then
    local floor, known = now_ms() * FENCES_PER_MS, tonumber(v[2] or 0)
    if floor <= known then floor = known + 1 + this_server % LONGEST_STEP end
    call('HSET', counters, 'server', this_server, 'fence', string.format('%.0f', floor))
  end
  return call('HINCRBY', counters, 'fence', 1)
end

-- Back to the queue under a new fence: the old owner is refused from now on.
local function hand_back(episode, member)
  unhold(episode, member.split, member.worker)
  call('HSET', member.group, 's' .. member.m, 'q', 'f' .. member.m, new_fence())
  open_episode(episode, member.split, member.floor, member.seq)
end

local function lease_lost(episode, fence)
  return refuse('LEASELOST', episode .. ': fence ' .. fence .. ' is no longer the newest')
end

-- A lease as `lease_from_row` reads it: {episode, member, attempts, fence, floor, task, journal}.
local function describe(episode)
  local task_id, m = split_episode(episode)
  local v = call('HMGET', group_key(task_id), 'a' .. m, 'f' .. m, 'floor')
  return {episode, tonumber(m), tonumber(v[1] or 0), tonumber(v[2]), tonumber(v[3]),
    call('GET', key('task:' .. task_id)), call('HVALS', key('journal:' .. episode))}
end
