-- Pieces that scripts put in front of themselves: episodes, groups, steps, admission.

-- part: episode
-- Episodes. A group is one hash, group:TASK_ID, small enough for Redis's compact encoding; its task is task:TASK_ID.
-- Of the group: seq, split, source, priority, size, min_version, cost, members_cost, state, at (ms, of the last change of
-- state), floor, due, ended, rewarded, lowest, rmin, rmax (rewards), step, reserved (members of an admitted group that
-- wait to be branches). Of member m: sM state (q, l, d, x; none while it waits), fM fence,
-- wM worker, aM attempts, kM fence of the last counted failure, lM workers that died with it, one a line,
-- nM journal bytes, tM response tokens, gM those of them that were sampled, bM payload bytes, hM what they count for,
-- rM 1 if it carries a reward, vM its lowest version, pM 1 if spilled, oM outcome without reward, yM nonce of the
-- completion that was acknowledged, cM of a branch: its parent's member, turn, shared entries, tokens sampled in them.
local function split_episode(episode)
  return string.match(episode, '^(.*)#(%d+)$')
end

local function group_key(task_id)
  return key('group:' .. task_id)
end

-- Another completion under the same fence has another nonce: what it stored is never taken for what was acknowledged.
local function payload_name(episode, fence, nonce)
  return episode .. '@' .. fence .. (nonce and '.' .. nonce or '')
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

-- Lost leases of an episode; `lost_by` is its field lM.
local function count_losses(lost_by)
  local _, losses = string.gsub(lost_by, '\n', '')
  return losses
end

-- The most episodes that a worker may hold while it runs this one (admission.most_together).
local function most_together(lost_by)
  local losses = count_losses(lost_by)
  if losses < 2 then return math.huge end
  return losses == 2 and 8 or 1
end

-- `most_held`: most_together and worker → how many such episodes it holds.
local function count_held(worker, lost_by, by)
  local most = most_together(lost_by)
  if most == math.huge then return end
  local field = most .. ' ' .. worker
  if call('HINCRBY', key('most_held'), field, by) <= 0 then call('HDEL', key('most_held'), field) end
end

local function hold(episode, split, worker, lost_by, now)
  count_held(worker, lost_by, 1)
  call('ZADD', key('leases'), now + run.lease_ttl_ms, episode)
  call('HINCRBY', key('workers'), worker, 1)
  count_split(split, 'leased', 1)
  if split == 'train' then count('leased', 1) end
end

-- `lost_by`: as it was when the episode was held.
local function unhold(episode, split, worker, lost_by)
  count_held(worker, lost_by, -1)
  call('ZREM', key('leases'), episode)
  if call('HINCRBY', key('workers'), worker, -1) <= 0 then
    call('HDEL', key('workers'), worker)
  end
  count_split(split, 'leased', -1)
  if split == 'train' then count('leased', -1) end
end

local function member_of(episode)
  local task_id, m = split_episode(episode)
  if not task_id then return nil end
  local group = group_key(task_id)
  local v = call('HMGET', group, 'f' .. m, 's' .. m, 'split', 'w' .. m, 'floor', 'seq', 'size', 'n' .. m, 'a' .. m,
    'l' .. m)
  return {
    task_id = task_id, m = m, group = group, fence = v[1], state = v[2], split = v[3], worker = v[4],
    floor = tonumber(v[5]), seq = tonumber(v[6]), size = tonumber(v[7]), journal_bytes = tonumber(v[8] or 0),
    attempts = tonumber(v[9] or 0), lost_by = v[10] or '',
  }
end

-- The member that `fence` still owns, or nil. A lease that ran out and was not given on is taken up again, and was not
-- lost: after a pause of Redis itself every worker continues.
local function owned(episode, fence, now)
  local member = member_of(episode)
  if not member or member.fence ~= fence or (member.state ~= 'l' and member.state ~= 'q') then return nil end
  if member.state == 'q' then
    -- First what needs memory: after a removal a full Redis 6.2 would let a script write whatever it likes.
    member.lost_by = string.gsub(member.lost_by, '[^\n]*\n$', '')
    call('HSET', member.group, 's' .. member.m, 'l', 'l' .. member.m, member.lost_by)
    close_episode(episode, member.split)
    hold(episode, member.split, member.worker, member.lost_by, now)
  else
    call('ZADD', key('leases'), now + run.lease_ttl_ms, episode)
  end
  return member
end

-- A Redis that was started again, or a replica in its place, may have forgotten its newest fences with its machine,
-- whose owners live on. It continues at a number that no start before it can have reached: ten for each millisecond of its
-- clock. Nothing may be added to the known ones: two starts that forgot the same would come to the same sum. Only where
-- the clock went back that must do, by a step of this start's own. (Numbers of 14 digits are the same in Lua's text.)
local FENCES_PER_MS, LONGEST_STEP = 10, 1000000
local function new_fence()
  local counters, this_server = key('counters'), server_start()
  local v = call('HMGET', counters, 'server', 'fence')
  if tonumber(v[1]) ~= this_server then
    local floor, known = server_ms() * FENCES_PER_MS, tonumber(v[2] or 0)
    if floor <= known then floor = known + 1 + this_server % LONGEST_STEP end
    call('HSET', counters, 'server', this_server, 'fence', string.format('%.0f', floor))
  end
  return call('HINCRBY', counters, 'fence', 1)
end

-- The ledger: the ends of episodes, and what processes used for them, for the head's accounts. Its numbers are fences: a
-- Redis that has forgotten its newest ones does not give them out again, which a head would pass over.
local function book(kind, packed)
  local number = new_fence()
  call('ZADD', key('ledger'), number, number .. ' ' .. kind .. ' ' .. packed)
  call('ZREMRANGEBYRANK', key('ledger'), 0, -LEDGER_KEPT - 1)
end

-- `rows`: episode, sampled tokens, …
local function book_fate(fate, rows)
  if #rows > 0 then book(fate, cmsgpack.pack(rows)) end
end

-- Back to the queue under a new fence: the old owner is refused from now on.
local function hand_back(episode, member)
  unhold(episode, member.split, member.worker, member.lost_by)
  call('HSET', member.group, 's' .. member.m, 'q', 'f' .. member.m, new_fence())
  open_episode(episode, member.split, member.floor, member.seq)
end

local function lease_lost(episode, fence)
  return refuse('LEASELOST', episode .. ': fence ' .. fence .. ' is no longer the newest')
end

-- A lease as `lease_from_row` reads it: {episode, member, attempts, fence, floor, task, journal, origin}.
local function describe(episode)
  local task_id, m = split_episode(episode)
  local v = call('HMGET', group_key(task_id), 'a' .. m, 'f' .. m, 'floor', 'c' .. m)
  return {episode, tonumber(m), tonumber(v[1] or 0), tonumber(v[2]), tonumber(v[3]),
    call('GET', key('task:' .. task_id)), call('HVALS', key('journal:' .. episode)), v[4] or ''}
end

-- part: group
-- Groups: what happens when all members have ended, and how a group leaves the queue.
local JOURNALS_KEPT = 100

-- Payload keys spread over a cluster, so a script cannot delete them: it names them here, with their bytes, and a client
-- sweeps.
local function garbage_row(v, episode, m)
  return payload_name(episode, v['f' .. m], v['y' .. m]) .. ' ' .. v['b' .. m]
end

-- A row of the ledger for a member.
local function add_row(rows, v, episode, m)
  rows[#rows + 1] = episode
  rows[#rows + 1] = tonumber(v['g' .. m] or 0)
end

local function fields_of(group)
  local flat, found = call('HGETALL', group), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

-- Delete a member's payload from the accounts. `consumed`: it no longer counts for back-pressure.
local function free_payload(v, group, episode, m, consumed)
  call('SADD', key('garbage'), garbage_row(v, episode, m))
  local held = tonumber(v['h' .. m])
  add_bytes(-held, (v.split == 'train' and not consumed) and -held or 0)
  call('HDEL', group, 'b' .. m, 'h' .. m)
end

local function drop_letter_journal(episode)
  local bytes = tonumber(call('HGET', key('letter:' .. episode), 'bytes') or 0)
  if bytes == 0 then return end
  add_bytes(-bytes, 0)
  call('HDEL', key('letter:' .. episode), 'bytes')
  call('DEL', key('letter_journal:' .. episode))
end

local function put_letter(episode, outcome, attempts)
  call('HSET', key('letter:' .. episode), 'outcome', outcome, 'attempts', attempts)
  call('ZADD', key('letters'), call('HINCRBY', key('counters'), 'letter_seq', 1), episode)
  local crowded_out = call('ZRANGE', key('letters'), -JOURNALS_KEPT - 1, -JOURNALS_KEPT - 1)[1]
  if crowded_out then drop_letter_journal(crowded_out) end
end

local function drop_letter(episode)
  drop_letter_journal(episode)
  call('ZREM', key('letters'), episode)
  call('DEL', key('letter:' .. episode))
end

local function fail_group(v, group, task_id)
  call('HSET', group, 'state', 'dead')
  count('dead_groups', 1)
  local rows = {}
  for m = 0, tonumber(v.size) - 1 do
    local episode = task_id .. '#' .. m
    if v['b' .. m] then
      add_row(rows, v, episode, m)
      free_payload(v, group, episode, m)
      count('group_failed', 1)
      if not v['r' .. m] then put_letter(episode, v['o' .. m], v['a' .. m] or 0) end
    end
  end
  book_fate('dead_letter', rows)
end

-- Remove every trace of a group but the counters. Returns its fields.
local function forget_group(task_id, consumed)
  local group = group_key(task_id)
  local v = fields_of(group)
  local held, waiting = tonumber(v.cost) + (v.floor and tonumber(v.members_cost) or 0), 0
  local payloads, gone = {}, {group, key('task:' .. task_id)}
  for m = 0, tonumber(v.size) - 1 do
    local episode, state = task_id .. '#' .. m, v['s' .. m]
    if state == 'l' then unhold(episode, v.split, v['w' .. m], v['l' .. m] or '') end
    if state == 'q' then close_episode(episode, v.split) end
    if v['b' .. m] then
      payloads[#payloads + 1] = garbage_row(v, episode, m)
      held = held + tonumber(v['h' .. m])
      if not consumed then waiting = waiting + tonumber(v['h' .. m]) end
    end
    if v['n' .. m] then
      gone[#gone + 1] = key('journal:' .. episode)
      held, waiting = held + tonumber(v['n' .. m]), waiting + tonumber(v['n' .. m])
    end
  end
  in_pieces(payloads, function(...) call('SADD', key('garbage'), ...) end)
  add_bytes(-held, v.split == 'train' and -waiting or 0)
  in_pieces(gone, function(...) call('DEL', ...) end)
  return v
end

local function is_reached(reward, bound)
  return reward >= bound - 1e-6 * math.max(1, math.abs(bound))
end

-- As `validation.same_reward`, with its very arithmetic: both queues filter the same groups. Takes texts.
local function same_reward(one, other)
  local a, b = tonumber(one), tonumber(other)
  return is_reached(a, b) and is_reached(b, a)
end

-- DAPO: a group whose rewards are all equal has no advantage to learn from; another one takes its place.
local function filter_group(v, task_id)
  local rows = {}
  for m = 0, tonumber(v.size) - 1 do
    if v['s' .. m] == 'd' then add_row(rows, v, task_id .. '#' .. m, m) end
  end
  count('filtered_groups', 1)
  count('filtered', #rows / 2)
  book_fate('filtered', rows)
  call('HINCRBY', key('counters'), 'filtered_since', 1)
  forget_group(task_id)
end

local function free_unrewarded(v, group, task_id)
  local rows = {}
  for m = 0, tonumber(v.size) - 1 do
    if v['b' .. m] and not v['r' .. m] then
      free_payload(v, group, task_id .. '#' .. m, m)
      count('unrewarded', 1)
      add_row(rows, v, task_id .. '#' .. m, m)
    end
  end
  book_fate('unrewarded', rows)
end

local function make_ready(group, task_id, lowest, seq)
  local due = tonumber(lowest) + run.max_staleness
  call('HSET', group, 'state', 'ready', 'due', due, 'at', now_ms())
  call('ZADD', key('ready'), score(due, tonumber(seq)), task_id)
end

-- Reads all members only where one of them has no reward: most groups need a few fields.
local function end_group(group, task_id)
  local v = call('HMGET', group, 'split', 'size', 'rewarded', 'rmin', 'rmax', 'source', 'lowest', 'floor', 'seq')
  if v[1] ~= 'train' then
    call('HSET', group, 'state', 'done')
    return
  end
  call('ZREM', key('admitted'), task_id)
  local size, rewarded, source = tonumber(v[2]), tonumber(v[3] or 0), v[6]
  if rewarded < math.min(run.min_group, size) then
    count_source(source, -1)
    fail_group(fields_of(group), group, task_id)
  elseif run.filter_groups == 'zero_variance' and v[4] and same_reward(v[4], v[5]) then
    count_source(source, -1)
    filter_group(fields_of(group), task_id)
  else
    if rewarded < size then free_unrewarded(fields_of(group), group, task_id) end
    make_ready(group, task_id, v[7] or v[8], v[9])
  end
end

-- Members that wait to be branches start as roots.
local function start_reserved(group, task_id, size)
  local v = call('HMGET', group, 'floor', 'seq')
  for m = 0, size - 1 do
    if not call('HGET', group, 's' .. m) then
      call('HSET', group, 's' .. m, 'q')
      open_episode(task_id .. '#' .. m, 'train', tonumber(v[1]), tonumber(v[2]))
    end
  end
  call('HSET', group, 'reserved', 0)
end

-- Follows the end of each member. Once all that have started have ended, no other can become a branch.
local function count_ended(group, task_id, size, ended, reserved)
  if ended + reserved < size then return end
  if reserved > 0 then start_reserved(group, task_id, size) else end_group(group, task_id) end
end

local function member_ended(member)
  local ended, reserved = call('HINCRBY', member.group, 'ended', 1), call('HGET', member.group, 'reserved')
  count_ended(member.group, member.task_id, member.size, ended, tonumber(reserved or 0))
end

-- The episode becomes a dead letter, and its journal moves there: it no longer counts for back-pressure, but still for
-- memory.
local function give_up(episode, member, outcome)
  unhold(episode, member.split, member.worker, member.lost_by)
  if member.journal_bytes > 0 then
    call('RENAME', key('journal:' .. episode), key('letter_journal:' .. episode))
    call('HSET', key('letter:' .. episode), 'bytes', member.journal_bytes)
    call('HDEL', member.group, 'n' .. member.m)
    if member.split == 'train' then add_bytes(0, -member.journal_bytes) end
  end
  put_letter(episode, outcome, member.attempts)
  call('HSET', member.group, 's' .. member.m, 'x')
  if member.split == 'train' then
    count('failed', 1)
    book_fate('dead_letter', {episode, 0})
  end
  count_split(member.split, 'done', 1)
  member_ended(member)
end

-- part: steps
-- Fixed steps: their rows of the ledger, and how many payload bytes each holds.
local function step_groups(step)
  local packed = call('HGET', STEPS, 'batch:' .. step)
  return packed and cmsgpack.unpack(packed) or {}
end

local function weigh(groups)
  local bytes, rows = 0, {}
  for _, group in ipairs(groups) do
    local fields = {}
    for _, episode in ipairs(group) do
      local m = select(2, split_episode(episode))
      fields[#fields + 1] = 'h' .. m
      fields[#fields + 1] = 'g' .. m
    end
    local values = call('HMGET', group_key((split_episode(group[1]))), unpack(fields))
    for i, episode in ipairs(group) do
      bytes = bytes + tonumber(values[2 * i - 1] or 0)
      rows[#rows + 1] = episode
      rows[#rows + 1] = tonumber(values[2 * i] or 0)
    end
  end
  return rows, bytes
end

-- Once per step, by its publication or its commit, whichever comes first: it is trained, and its payloads no longer hold
-- admission back.
local function count_step_trained(step, groups)
  if step < math.max(run.version, run.trained_below) then return end
  local rows, bytes = weigh(groups)
  count('trained', #rows / 2)
  book_fate('trained', rows)
  add_bytes(0, -bytes)
  call('HSET', STEPS, 'trained_below', step + 1)
end

-- part: admission
-- Admission: admission.py in Lua. `places`, `may_admit` and `may_ship` say there what they say here.
local function up_to(step)
  return '(' .. score(step + 1, 0)
end

-- Under `mask` a running group that is late occupies no place.
local function count_unshipped(step)
  local low = '-inf'
  if run.overage == 'mask' then low = score(run.next_step, 0) end
  return call('ZCOUNT', key('admitted'), low, up_to(step)) + call('ZCOUNT', key('ready'), '-inf', up_to(step))
end

local function places(step)
  return math.max(0, step - run.next_step + 1) * run.groups_per_step
end

-- Steps after version + max_staleness need no look: no due lies there, and each adds places.
local function may_admit(due)
  for step = due, math.max(due, run.version + run.max_staleness) do
    if count_unshipped(step) >= places(step) then return false end
  end
  return true
end

-- Back-pressure. One step's worth of groups is always admitted: else a full queue could never ship, nor empty.
local function room_allows()
  local in_system = call('ZCARD', key('admitted')) + call('ZCARD', key('ready'))
  for step = math.max(run.version, run.committed_step), run.next_step - 1 do
    in_system = in_system + run.groups_per_step - tonumber(call('HGET', STEPS, 'lost:' .. step) or 0)
  end
  if in_system < run.groups_per_step then return true end
  if run.max_groups > 0 and in_system >= run.max_groups then return false end
  return tonumber(call('HGET', key('counters'), 'unconsumed') or 0) <= run.max_bytes
end

-- First group of a queue that a worker at `version` may run, with its score; those that ask for newer weights are
-- passed over.
local function first_fit(queue, version)
  local from = 0
  repeat
    local found = call('ZRANGE', queue, from, from + 63, 'WITHSCORES')
    for i = 1, #found, 2 do
      local min_version = tonumber(call('HGET', group_key(found[i]), 'min_version'))
      if min_version <= version then return found[i], tonumber(found[i + 1]) end
    end
    from = from + 64
  until #found < 128 or from >= 1024
  return nil
end

local function next_queued(version)
  local best, best_score, best_queue
  for _, queue in ipairs(queue_keys(quota_of())) do
    local task_id, at = first_fit(queue, version)
    if task_id and (not best or at < best_score) then best, best_score, best_queue = task_id, at, queue end
  end
  return best, best_queue
end

-- Admit one group for a worker at `version` and open all its episodes. Returns whether one was admitted.
local function admit(version, now)
  local floor = math.min(version, run.version)
  local due = floor + run.max_staleness
  if not room_allows() or not may_admit(due) then return false end
  local task_id, queue = next_queued(version)
  if not task_id then return false end
  local group = group_key(task_id)
  local v = call('HMGET', group, 'seq', 'size', 'source', 'members_cost')
  local seq = tonumber(v[1])
  call('ZREM', queue, task_id)
  count('queued_episodes', -tonumber(v[2]))
  count_source(v[3], 1)
  add_bytes(tonumber(v[4]), 0)
  call('ZADD', key('admitted'), score(due, seq), task_id)
  call('HSET', group, 'state', 'admitted', 'floor', floor, 'due', due, 'at', now)
  local size = tonumber(v[2])
  local roots = math.ceil(size / (run.branches + 1))
  if roots < size then call('HSET', group, 'reserved', size - roots) end
  for m = 0, roots - 1 do
    call('HSET', group, 's' .. m, 'q')
    open_episode(task_id .. '#' .. m, 'train', floor, seq)
  end
  return true
end
