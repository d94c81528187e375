"""Arguments with which the tests load each config; 'default' is none."""

_ARGUMENTS = {
  'ablations': """
    positions pooling head axial optimizer overlap
    positions,name=my_set,classes=0,epochs=3 optimizer,seeds=2,grid
    positions,tiny pooling,tiny head,tiny axial,tiny optimizer,tiny
    overlap,tiny shape,tiny positions,embedded,steps=300,seeds=3
  """,
  'algoperf': """
    default target_setting,faults folder target_setting,tiny synthetic,tiny
  """,
  'distill_patient': 'default epochs=300 folder tiny',
  'evaluate': """
    folder tfds folder,fewshot tfds,fewshot,size=384
    tfds,accuracy,knn,logistic,flip
  """,
  'evaluate_imagenet': """
    default val,real,size=384,resize v2,topimages a,r
    val,timm,flip sketch,big_vision val,original,size=384
  """,
  'fewshot': 'default imagenet pets,dtd,sweep cifar100,knn,logistic',
  'finetune': """
    imagenet,B/16 imagenet,L/16,polyak imagenet,H/14,polyak
    imagenet,B/16,dev,lr=.06
    imagenet,B/16,layer_decay=.85
    cifar10,B/32 cifar100,L/32,resize pets,B/16,dev,resize_small
    flowers,S/16,size=224,resize folder,Ti/16,epochs=20
    folder,S/32,held_out=20,balanced folder,B/16,class_weights,adapt_channels
    imagenet,R50+B/16,lr=.06 imagenet,R50+B/32 pets,R50+L/16 cifar100,R50+L/32
    flowers,R26+S/32,size=224 cifar10,R26+B/32 cifar10,R+Ti/16
    imagenet,R50x1,bit imagenet,R152x2,bit,postact,size=480
    cifar100,R101x3,bit,dev pets,R50x3 folder,R101x1,bit
    folder,R50x2,bit,epochs=20 imagenet,R152x1,bit imagenet,R152x4,polyak
    cifar10,R200x3 cifar10,Mixer-B/16 imagenet,Mixer-B/32 flowers,Mixer-L/16
    imagenet,B/16,tiny imagenet,tiny
    folder,from_weights,tiny cifar10,tiny cifar100,tiny pets,tiny
    flowers,tiny folder,tiny imagenet,S/16,augreg,size=224
    imagenet,B/32,augreg,dev,v2 cifar100,L/16,augreg,steps=2500
    pets,S/32,augreg,dev kitti,Ti/16,augreg
    resisc45,B/16,augreg,dev,steps=10000 kitti,augreg,steps=2500,tiny
  """,
  'gradient_precision': 'default seeds=1,steps=300 tiny',
  'masked_patches': """
    B/16 B/32 S/16 S/32 L/16 L/32 B/16,downsampled B/16,pixels,ratio=0.15
    B/16,name=my_set,steps=100000 B/16,imagenet B/16,imagenet,folder B/16,tiny
    B/16,imagenet,downsampled,tiny B/32,imagenet,pixels,tiny
  """,
  'masked_patches_embedded': """
    default mean_colour,ratio=0.15 fractals,pixels tiny
    fractals,mean_colour,steps=6,tiny
  """,
  'pretrain_bit': """
    imagenet,R50x1 imagenet,R50x3 imagenet,R101x1 imagenet,R101x3
    imagenet,R152x2 imagenet,R152x4 imagenet21k,R50x1 imagenet21k,R152x4
    imagenet,R50x1,postact imagenet,R50x1,folder,epochs=30 imagenet,R50x1,tiny
    imagenet21k,R152x2,tiny
  """,
  'finetune_deit3': """
    imagenet,S/16 imagenet,M/16 imagenet,B/16,layer_decay=0.75 imagenet,L/16
    imagenet,H/14 imagenet,B/16,size=384,epochs=10
    imagenet21k,S/16 imagenet21k,M/16,folder
    imagenet21k,B/16 imagenet21k,L/16 imagenet21k,H/14
    imagenet,H/14,tiny imagenet21k,B/16,tiny
  """,
  'pretrain_deit': """
    S/16 Ti/16 B/16,epochs=1000 S/16,distilled Ti/16,distilled,soft B/16,soft
    folder,distilled S/16,tiny Ti/16,distilled,tiny
  """,
  'pretrain_deit3': """
    imagenet,S/16 imagenet,M/16 imagenet,B/16 imagenet,L/16 imagenet,H/14
    imagenet21k,S/16 imagenet21k,M/16 imagenet21k,B/16 imagenet21k,L/16
    imagenet21k,H/14,fsdp,tensor=2 imagenet,B/16,folder,epochs=400
    imagenet,B/16,tiny imagenet21k,H/14,fsdp,tiny
  """,
  'pretrain_imagenet': """
    B/16 B/32 L/16 L/32 H/14 B/16,epochs=90 B/16,folder B/16,tiny
  """,
  'pretrain_imagenet21k': """
    L/16 L/32 B/16 B/32 L/16,epochs=30 L/32,epochs=30 L/16,fsdp,tensor=2
    B/16,tiny
  """,
  'pretrain_jft': """
    L/16 L/32 B/16 B/32 H/14 R50+B/16 R50+B/32 R50+L/16 R50+L/32 R50x1 R50x2
    R101x1 R152x1 R152x2 R200x3,lr=5e-4 L/16,epochs=7 R152x2,epochs=14
    R50x1,sgd R152x2,sgd,postact B/16,name=my_set,classes=0 H/14,fsdp
    H/14,fsdp,tensor=2 L/16,tensor=2 B/16,tiny R50+L/32,tiny R101x1,sgd,tiny
  """,
  'pretrain_scaling_vit': """
    G/14 g/14 So400m/14 L/16 B/16 B/32 S/16 S/32 Ti/16
    G/14,epochs=3,fsdp,tensor=2,name=my_set,classes=0 So400m/14,epochs=1
    G/14,fsdp,tensor=2,tiny So400m/14,tiny
  """,
  'pretrain_augreg': """
    imagenet,B/16 imagenet,Ti/16,light2 imagenet,S/32,light1
    imagenet,S/16,folder,weight_decay=0.03 imagenet,B/32,strong2,reg=0,faults
    imagenet,R+Ti/16,light2 imagenet,R26+S/32,light2 imagenet,R50+L/32,medium1
    imagenet21k,L/16,strong1,reg=0.1 imagenet21k,B/16,epochs=30,medium2
    imagenet,B/16,tiny imagenet21k,R50+L/32,tiny
  """,
  'pretrain_better_plain': """
    S/16 S/16,epochs=150,faults S/16,epochs=300 S/16,folder B/16 B/16,tiny
    S/16,faults,tiny
  """,
  'quickstart': 'default tiny',
  'recipes_embedded': 'default seeds=1,steps=300 tiny',
  'scaling_compute': """
    default r200_lr=5e-4,seeds=3 B/32,R50x1,R50+B/32,grid,real
    name=my_set,classes=0,L/16,H/14 tiny B/32,R50x1,tiny
  """,
  'scaling_data': """
    default name=my_set,classes=0,images=5000000,sizes=500k+1M+all,B/32,R50x1
    fig3 fig3,B/16,H/14,R50x1,seeds=3,grid tiny B/32,sizes=9M+all,tiny
    fig3,tiny
  """,
  'scaling_embedded': 'default fractals seeds=2,steps=300 tiny fractals,tiny',
  'scaling_shape': 'default depth,lr=3e-4,epochs=14 tiny patch,all,tiny',
  'train_folder': """
    default S/16,size=224,held_out=20,balanced B/16,class_weights,epochs=3
    R50x1,lr=3e-3 Mixer-B/16,size=224 tiny
  """,
  'transfer': """
    default imagenet,L/16,jft,polyak H/14,cifar10,pets,seeds=1
    R50x1,jft,flowers,bit R50+B/16,jft,imagenet,size=224,resize tiny
    R50x1,pets,bit,tiny B/16,augreg L/16,augreg,imagenet1k,size=224,seeds=1
    S/16,augreg,pets,kitti,tiny
  """,
  'vtab': """
    default L/16,sweep,seeds=1 H/14,natural,kitti
    R50x1,specialized,size=224,postact Mixer-B/16,structured tiny
    seeds=1,sweep,dtd,clevr_count,tiny
  """,
}
VARIANTS = {
  name: tuple(x.replace('default', '') for x in text.split())
  for name, text in _ARGUMENTS.items()
}
