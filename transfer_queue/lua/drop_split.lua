-- needs: run, full, server, episode, queue, group
-- ARGV: split. Everything of it is deleted.
for _, task_id in ipairs(call('ZRANGE', key('split:' .. ARGV[1]), 0, -1)) do
  forget_group(task_id)
  drop_letter(task_id .. '#0')
end
call('DEL', key('split:' .. ARGV[1]))
for _, state in ipairs({'queued', 'leased', 'done'}) do call('HDEL', key('splits'), ARGV[1] .. ' ' .. state) end
return 1
