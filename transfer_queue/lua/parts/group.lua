-- Groups: what happens when all members have ended, and how a group leaves the ledger.

-- Payload keys spread over a cluster, so a script cannot delete them: it names them here and a client sweeps.
local function discard_payload(episode, fence)
  call('SADD', key('garbage'), payload_name(episode, fence))
end

local function fields_of(group)
  local flat, found = call('HGETALL', group), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

-- Delete a member's payload from the accounts. `consumed`: it no longer counts for back-pressure.
local function free_payload(v, group, episode, m, consumed)
  discard_payload(episode, v['f' .. m])
  add_bytes(consumed and 'consumed' or v.lane, -tonumber(v['b' .. m]))
  call('HDEL', group, 'b' .. m)
end

local function put_letter(episode, outcome, attempts)
  call('HSET', key('letter:' .. episode), 'outcome', outcome, 'attempts', attempts)
  call('ZADD', key('letters'), call('HINCRBY', RUN, 'letter_seq', 1), episode)
end

local function drop_letter(episode)
  call('ZREM', key('letters'), episode)
  local bytes = tonumber(call('HGET', key('letter:' .. episode), 'bytes') or 0)
  if bytes ~= 0 then call('HINCRBY', RUN, 'bytes', -bytes) end
  call('DEL', key('letter:' .. episode), key('letter_journal:' .. episode))
end

local function bury(v, group, task_id)
  call('HSET', group, 'state', 'dead')
  count('dead_groups', 1)
  for m = 0, tonumber(v.size) - 1 do
    local episode = task_id .. '#' .. m
    if v['b' .. m] and v['r' .. m] then free_payload(v, group, episode, m) end
    if v['s' .. m] == 'd' and not v['r' .. m] then put_letter(episode, v['o' .. m], v['a' .. m] or 0) end
  end
end

local function end_group(group, task_id)
  local v = fields_of(group)
  if v.lane ~= 'train' then
    call('HSET', group, 'state', 'done')
    return
  end
  call('ZREM', key('admitted'), task_id)
  local size, rewarded = tonumber(v.size), tonumber(v.rewarded or 0)
  for m = 0, size - 1 do
    if v['b' .. m] and not v['r' .. m] then free_payload(v, group, task_id .. '#' .. m, m) end
  end
  if rewarded < math.min(run.min_group, size) then
    bury(v, group, task_id)
    return
  end
  local due = tonumber(v.lowest or v.floor) + run.max_staleness
  call('HSET', group, 'state', 'ready', 'due', due)
  call('ZADD', key('ready'), score(due, tonumber(v.seq)), task_id)
end

local function member_ended(member)
  if call('HINCRBY', member.group, 'ended', 1) == member.size then
    end_group(member.group, member.task_id)
  end
end

-- Remove every trace of a group but the counters. Returns its fields. Late writers of earlier leases may have left
-- payloads behind (zM names their fences).
local function forget_group(task_id, consumed)
  local group = group_key(task_id)
  local v = fields_of(group)
  for m = 0, tonumber(v.size) - 1 do
    local episode, state = task_id .. '#' .. m, v['s' .. m]
    if state == 'l' then unhold(episode, v.lane, v['w' .. m]) end
    if state == 'q' then close_episode(episode, v.lane) end
    if v['b' .. m] then free_payload(v, group, episode, m, consumed) end
    if v['n' .. m] then
      add_bytes(v.lane, -tonumber(v['n' .. m]))
      call('DEL', key('journal:' .. episode))
    end
    for fence in string.gmatch(v['z' .. m] or '', '%d+') do discard_payload(episode, fence) end
  end
  call('DEL', group)
  return v
end
