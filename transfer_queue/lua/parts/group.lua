-- Groups: what happens when all members have ended, and how a group leaves the queue.
local JOURNALS_KEPT = 100

-- Payload keys spread over a cluster, so a script cannot delete them: it names them here and a client sweeps. Bytes of
-- 0: unknown, the client looks.
local function discard_payload(episode, fence, bytes)
  call('SADD', key('garbage'), payload_name(episode, fence) .. ' ' .. bytes)
end

local function fields_of(group)
  local flat, found = call('HGETALL', group), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

-- Delete a member's payload from the accounts. `consumed`: it no longer counts for back-pressure.
local function free_payload(v, group, episode, m, consumed)
  discard_payload(episode, v['f' .. m], v['b' .. m])
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
  for m = 0, tonumber(v.size) - 1 do
    local episode = task_id .. '#' .. m
    if v['b' .. m] then
      free_payload(v, group, episode, m)
      count('group_failed', 1)
      if not v['r' .. m] then put_letter(episode, v['o' .. m], v['a' .. m] or 0) end
    end
  end
end

-- Remove every trace of a group but the counters. Returns its fields. Late writers of earlier leases may have left
-- payloads behind (zM names their fences).
local function forget_group(task_id, consumed)
  local group = group_key(task_id)
  local v = fields_of(group)
  for m = 0, tonumber(v.size) - 1 do
    local episode, state = task_id .. '#' .. m, v['s' .. m]
    if state == 'l' then unhold(episode, v.split, v['w' .. m]) end
    if state == 'q' then close_episode(episode, v.split) end
    if v['b' .. m] then free_payload(v, group, episode, m, consumed) end
    if v['n' .. m] then
      add_split_bytes(v.split, -tonumber(v['n' .. m]))
      call('DEL', key('journal:' .. episode))
    end
    for fence in string.gmatch(v['z' .. m] or '', '%d+') do discard_payload(episode, fence, 0) end
  end
  add_bytes(-tonumber(v.cost) - (v.floor and tonumber(v.members_cost) or 0), 0)
  call('DEL', group, key('task:' .. task_id))
  return v
end

-- DAPO: a group whose rewards are all equal has no advantage to learn from; another one takes its place.
local function filter_group(v, task_id)
  local completed = 0
  for m = 0, tonumber(v.size) - 1 do
    if v['s' .. m] == 'd' then completed = completed + 1 end
  end
  count('filtered_groups', 1)
  count('filtered', completed)
  call('HINCRBY', key('counters'), 'filtered_since', 1)
  forget_group(task_id)
end

local function free_unrewarded(v, group, task_id)
  for m = 0, tonumber(v.size) - 1 do
    if v['b' .. m] and not v['r' .. m] then
      free_payload(v, group, task_id .. '#' .. m, m)
      count('unrewarded', 1)
    end
  end
end

local function make_ready(v, group, task_id)
  local due = tonumber(v.lowest or v.floor) + run.max_staleness
  call('HSET', group, 'state', 'ready', 'due', due, 'at', now_ms())
  call('ZADD', key('ready'), score(due, tonumber(v.seq)), task_id)
end

local function end_group(group, task_id)
  local v = fields_of(group)
  if v.split ~= 'train' then
    call('HSET', group, 'state', 'done')
    return
  end
  call('ZREM', key('admitted'), task_id)
  local enough = tonumber(v.rewarded or 0) >= math.min(run.min_group, tonumber(v.size))
  if enough and run.filter_groups == 'zero_variance' and v.rmin == v.rmax then
    count_source(v.source, -1)
    filter_group(v, task_id)
    return
  end
  if enough then
    free_unrewarded(v, group, task_id)
    make_ready(v, group, task_id)
  else
    count_source(v.source, -1)
    fail_group(v, group, task_id)
  end
end

local function member_ended(member)
  if call('HINCRBY', member.group, 'ended', 1) == member.size then
    end_group(member.group, member.task_id)
  end
end
